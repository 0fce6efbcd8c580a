"""What another user of the host can do to ranks that share memory: nothing."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_a2a.errors import EpA2AError
from ep_a2a.memory import host_shm, private_files
from ep_a2a.memory.arena import allocate_symmetric
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, built_op, run_step
from tests.cases.op_checks import raised
from tests.integration.programs import run, succeeded
from tests.shared_files import files_of

INTRUDER = Path(__file__).resolve().parents[1] / "programs/intruder.py"
NOBODY = 65534
NUM_BYTES = 4096

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


def intrude(user: int, address: int, folder: str | Path, *processes: int) -> list[str]:
    """Attempts that worked."""
    printed = succeeded(run(sys.executable, INTRUDER, *map(str, (user, address, folder, *processes))))
    found: list[str] = json.loads(printed)
    return found


def be_visited(context: RankContext, case: Case, user: int) -> dict[str, Any]:
    """An op is built and used; rank 0 lets the intruder in while files have names, and while tokens lie in memory."""
    original = host_shm._map
    visits: dict[str, Any] = {}
    pids = Rendezvous(context.group).exchange("process numbers", os.getpid())

    def visited(path: Path, num_bytes: int) -> torch.Tensor:
        if context.rank == 0 and not visits:
            visits["files"] = files_of(*pids)
            visits["on files"] = intrude(user, 0, private_files.private_folder(), *pids)
        return original(path, num_bytes)

    host_shm._map = visited
    try:
        with built_op(context, case) as op:
            run_step(case, op, 0, context.device)
            op.arena.rendezvous.barrier("tokens are in memory")
            if context.rank == 0:
                address = op.memory.acquired.symmetric["own"].local.data_ptr()
                folder = os.path.dirname(os.readlink(f"/proc/self/fd/{stacks_descriptor()}"))
                visits["on memory"] = intrude(user, address, folder, *pids)
            op.arena.rendezvous.barrier("visited")
    finally:
        host_shm._map = original
    return visits


def stacks_descriptor() -> int:
    """The file in the pool's own folder that every rank keeps open."""
    links = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_link(name)}
    return next(number for number, target in links.items() if target.endswith(".stacks"))


def is_link(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


@needs_root
def test_another_user_cannot_reach_what_ranks_share(ranks):
    visits = ranks(be_visited, 2, Case(world_size=2, tokens=((3, 5),)), NOBODY)[0]
    assert len(visits["files"]) >= 2
    assert visits["on files"] == visits["on memory"] == []


@needs_root
def test_the_intruder_would_notice_if_it_could(ranks):
    """The same attempts as the ranks' own user succeed: so they mean something where they do not."""
    visits = ranks(be_visited, 2, Case(world_size=2, tokens=((3, 5),)), os.geteuid())[0]
    assert {f"{what} {name}" for what in ("read", "write") for name in visits["files"]} <= set(visits["on files"])
    kinds = {text.split()[0] for text in visits["on memory"]}
    assert {"memory", "addresses", "list", "make"} <= kinds


def take_a_planted_file(context: RankContext) -> None:
    """Rank 1 announces another file than the one it made, as somebody who writes to the store could."""
    planted = private_files.in_private_folder(f"planted_{os.getpid()}")
    rendezvous = Rendezvous(context.group)
    exchange = rendezvous.exchange

    def lie(label: str, message: Any) -> list[Any]:
        return exchange(label, planted.name if label == "shared memory names" else message)

    if context.rank == 1:
        planted.write_bytes(bytes(NUM_BYTES))
        planted.chmod(0o666)
        rendezvous.exchange = lie  # type: ignore[method-assign]
    try:
        raised(EpA2AError, lambda: allocate_symmetric(rendezvous, context.device, NUM_BYTES), "that only user")
    finally:
        planted.unlink(missing_ok=True)


def test_a_file_that_a_rank_cannot_have_made_is_refused(ranks):
    """tests/unit/test_private_files.py has others."""
    ranks(take_a_planted_file, 2)
