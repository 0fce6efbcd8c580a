"""The EP group on GPUs: the bodies of tests/multiprocess."""

from tests.markers import needs_own_gpus
from tests.multiprocess.test_parallel_state import describe_groups, life_of_a_manager

pytestmark = needs_own_gpus(2)


def test_groups_on_gpus(ranks):
    for rank, groups in enumerate(ranks(describe_groups, 2, 2)):
        assert groups["ep"] == ("ep:0", [0, 1], rank, 2, 1)
        assert groups["tp"] == (f"tp:{rank}", [rank], 0, 1, rank)


def test_manager_gets_the_gpu_and_its_group(ranks):
    ranks(life_of_a_manager, 2)
