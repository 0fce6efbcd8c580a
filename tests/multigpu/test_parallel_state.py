"""The EP group and the topology on GPUs: the bodies of tests/multiprocess, plus what only a GPU can say."""

import torch

from ep_a2a.topology import classify, gather_report
from tests.markers import needs_own_gpus
from tests.multiprocess.test_parallel_state import describe_groups, life_of_a_manager

pytestmark = needs_own_gpus(2)


def report(context):
    allocated = torch.cuda.memory_allocated(context.device)
    gathered = gather_report(context.group)
    return gathered, torch.cuda.memory_allocated(context.device) - allocated


def test_groups_on_gpus(ranks):
    for rank, groups in enumerate(ranks(describe_groups, 2, 2, device="cuda")):
        assert groups["ep"] == ("ep:0", [0, 1], rank, 2, 1)
        assert groups["tp"] == (f"tp:{rank}", [rank], 0, 1, rank)


def test_manager_gets_the_gpu_and_its_group(ranks):
    ranks(life_of_a_manager, 2, device="cuda")


def test_gpu_facts(ranks):
    for gathered, allocated_bytes in ranks(report, 2, device="cuda"):
        assert gathered.errors == ()
        assert [facts.device_kind for facts in gathered.ranks] == ["cuda", "cuda"]
        assert [facts.visible_device_index for facts in gathered.ranks] == [0, 1]
        assert len({facts.gpu_uuid for facts in gathered.ranks}) == 2
        assert all(facts.gpu_name and facts.sm_count for facts in gathered.ranks)
        assert classify(gathered).num_nodes == 1
        assert allocated_bytes == 0
