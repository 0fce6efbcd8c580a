"""`ep_a2a.survivors` among hosts: ranks of some hosts die at once, all that are left go on together."""

import os
import pickle
import signal as signals
import time
from pathlib import Path
from unittest import mock

import pytest

from ep_a2a import survivors
from ep_a2a.errors import RankTimeoutError, UnsupportedError
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory.agreement import PATIENCE_SECS
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankContext
from ep_a2a.topology import facts
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, run_step
from tests.cases.op_checks import raised
from tests.cases.survivor_cases import experts_of_ranks, go_on, settled_step
from tests.netns.launch import SHORT_TIMEOUT_SECS, SLACK_SECS, run_on_hosts
from tests.netns.network import Network


def die_and_go_on(context: RankContext, directory: Path, num_hosts: int, victims: list[int]):
    """Ranks die in one step, and the others go on; whom the error names, the ranks left, and the experts lost."""
    case = Case(
        world_size=context.world_size,
        num_experts=2 * context.world_size,
        hidden_dim=32,
        tokens=((4, 3, 5, 2),),
        max_tokens=5,
        num_nodes=num_hosts,
    )
    # the namespaces of one machine have its boot id
    host = f"host {context.rank // (context.world_size // num_hosts)}"
    mock.patch.object(facts, "host_identity", return_value=host).start()
    manager = create_manager("ep_a2a", context.group)
    op = manager.get_handle(kwargs_of(case, context.rank))
    run_step(case, op, 0, context.device)
    op.set_timeout(SHORT_TIMEOUT_SECS)
    Rendezvous(context.group).barrier("before the kills")
    if context.rank in victims:
        Path(directory, f"result_{context.rank}").write_bytes(pickle.dumps(("value", None)))
        os.kill(os.getpid(), signals.SIGKILL)
    start = time.monotonic()
    error = raised(RankTimeoutError, lambda: settled_step(case, op, 1))
    # whoever waits for a rank that waits itself waits twice
    assert time.monotonic() - start < 2 * SHORT_TIMEOUT_SECS + PATIENCE_SECS + SLACK_SECS
    left = survivors(error, manager, experts_of_ranks(case))
    manager.destroy()
    hosts = [rank // (context.world_size // num_hosts) for rank in left.ranks]
    if len({hosts.count(host) for host in hosts}) == 1:
        go_on(context, case, left, num_nodes=len(set(hosts)))
    else:
        raised(UnsupportedError, lambda: left.manager.get_handle(kwargs_of(case, left.manager.rank)), "equally many")
        # each rank a node of its own
        go_on(context, case, left, num_nodes=len(left.ranks), gpu_per_node=1)
    return error.missing_ranks, error.late_ranks, left.ranks, left.lost_experts


@pytest.mark.parametrize(
    ("num_hosts", "ranks_per_host", "victims", "lost"),
    [(3, 1, (1,), ()), (2, 2, (0, 3), (0,)), (2, 2, (2, 3), (3,)), (2, 2, (3,), ())],
)
def test_survivors_of_hosts_go_on_together(num_hosts, ranks_per_host, victims, lost, tmp_path):
    with Network(num_hosts) as network:
        answers = run_on_hosts(network, tmp_path, die_and_go_on, ranks_per_host, num_hosts, list(victims))
    left = tuple(rank for rank in range(len(answers)) if rank not in victims)
    for rank in left:
        assert answers[rank] == (victims, (), left, lost)
