"""An error of one rank, at whatever line of the package, ends collective calls on all ranks with its number and text.

The lines are those that a good run executes between the entry of a call and its last meeting. Left out are the modules
by which ranks tell each other anything: what fails there, as a rule the store, cannot be told by it.
"""

import contextlib
import functools
import gc
import linecache
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a.errors import ConfigMismatchError
from ep_a2a.managers.make_op import make_op
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory import private_files
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankContext, run_ranks
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case

PACKAGE = Path(ep_a2a.__file__).parent
MACHINERY = tuple(
    str(PACKAGE / name)
    for name in ("memory/rendezvous.py", "memory/peers.py", "memory/verdict.py", "memory/host_record.py", "clock.py")
)
ENTERS = ("telling", "manager.make(", "return Rendezvous(", "try:")
"""Parts of lines that only lead to the first line whose error is told, or hold no code that could fail."""
FAILING, WORLD_SIZE, SEED = 1, 2, 20261129
NUM_QUICK, NUM_AT_ONCE = 10, 100
CASE = Case(world_size=WORLD_SIZE, tokens=((4, 3),), hidden_dim=32)
Place = tuple[str, int]


def one_op(context: RankContext, close: contextlib.ExitStack) -> None:
    op = make_op(context.group, hidden_size=32, num_experts=4, topk=2, max_tokens=4, device="cpu")
    close.callback(op.close)
    op.reset()


def between_nodes(context: RankContext, close: contextlib.ExitStack, **kwargs: Any) -> None:
    manager = create_manager("ep_a2a", context.group)
    close.callback(manager.destroy)
    manager._device = torch.device("cpu")
    op = manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=1, **kwargs))
    op.set_max_sms(3)
    manager._dispatched_by = weakref.ref(op)
    manager.reset()


def between_hosts(context: RankContext, close: contextlib.ExitStack) -> None:
    between_nodes(context, close, internode_transport="torch.distributed")


def collective(context: RankContext, close: contextlib.ExitStack) -> None:
    manager = create_manager("naive", context.group)
    close.callback(manager.destroy)
    manager._device = torch.device("cpu")
    close.push(manager.get_handle(kwargs_of(CASE, context.rank)))


CALLS: tuple[Callable[..., None], ...] = (one_op, between_nodes, between_hosts, collective)


def traced(seen: Callable[[Any], None], calls: Callable[[], None]) -> None:
    """Does `calls` and shows each line of the package, before it runs, to `seen`, and each entry of a meeting."""

    def line(frame: Any, event: str, _: object) -> Any:
        if event == "line":
            seen(frame)
        return line

    def entry(frame: Any, *_: object) -> Any:
        name = frame.f_code.co_filename
        if frame.f_code is Rendezvous.exchange.__code__:
            seen(frame)
        is_machinery = name in MACHINERY or frame.f_code.co_qualname.startswith("OwnProcess")
        return line if name.startswith(str(PACKAGE)) and not is_machinery else None

    sys.settrace(entry)
    try:
        calls()
    finally:
        sys.settrace(None)


def places_of(context: RankContext, calls: Callable[..., None]) -> list[Place]:
    """Every (file, line) of the package that the calls execute before their last meeting, in order."""
    places: dict[Place, None] = {}
    before_meeting: list[Place] = []

    def seen(frame: Any) -> None:
        place = frame.f_code.co_filename, frame.f_lineno
        if place[0] in MACHINERY:
            before_meeting[:] = places
        elif not any(part in linecache.getline(*place) for part in ENTERS):
            places[place] = None

    # what only the first run of a process executes is not looked at
    for trace in (lambda _: None, seen):
        with contextlib.ExitStack() as close:
            traced(trace, lambda: calls(context, close))
    return before_meeting


def plant(context: RankContext, calls: Callable[..., None], places: list[Place]) -> None:
    """The calls, once for each place, where the failing rank raises an error."""
    context = RankContext(context.rank, context.world_size, context.device, dist.new_group())
    meeting = Rendezvous(dist.new_group())
    # so that a collection looks at what a call has left, and not at all of torch
    gc.freeze()
    for place in [None, *places]:
        text, reached, error = f"planted at {place}", [], None

        def seen(frame: Any) -> None:
            if (frame.f_code.co_filename, frame.f_lineno) == place and not reached:  # noqa: B023
                reached.append(place)  # noqa: B023
                raise RuntimeError(text)  # noqa: B023

        with contextlib.ExitStack() as close:
            try:
                if context.rank == FAILING:
                    traced(seen, lambda: calls(context, close))
                else:
                    calls(context, close)
            except Exception as caught:  # noqa: BLE001
                error = caught
            # some questions about the machine may fail
            failed = meeting.exchange(f"after {place}", None if error is None else str(error))[FAILING]
            assert (error is None) == (failed is None), (place, error, failed)
            if context.rank == FAILING:
                assert bool(reached) == (place is not None), place
                assert error is None or text in str(error), (place, error)
            elif failed is not None:
                assert isinstance(error, ConfigMismatchError), (place, error)
                assert f"rank {FAILING} failed with" in str(error), (place, error)
                assert text in str(error), (place, error)
            if failed is not None:
                # nobody waits for a rank that has nothing to close
                close.pop_all()
        del error
        gc.collect()
    # between the lines that make a file and that note its name no program fails
    for path in private_files.private_folder().glob(f"{private_files.own_prefix()}*"):
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize(
    "every", [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.full)]
)
def test_the_other_ranks_are_told(ranks: Any, calls: Callable[..., None], every: bool) -> None:
    places = ranks(places_of, WORLD_SIZE, calls)[FAILING]
    assert len(places) > NUM_QUICK
    chosen = places if every else random.Random(SEED).sample(places, NUM_QUICK)
    # groups of gloo that an error has left end with their processes, so many places take several
    run = functools.partial(run_ranks, device="cpu") if every else ranks
    for first in range(0, len(chosen), NUM_AT_ONCE):
        run(plant, WORLD_SIZE, calls, chosen[first : first + NUM_AT_ONCE])
