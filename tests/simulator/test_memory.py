"""The memory of the simulator: what it lets a kernel see, and what not, by kernels that pass one message."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton.language as tl

from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import after_previous_launch, allow_next_launch, pause
from tests.simulator.memory import MixedScopes
from tests.simulator.ranks import Conditions, Context, simulate
from tests.simulator.reads import Overtaken

LATE = Conditions()
DATA, FLAG, SEEN = 0, 64, 128
"""Byte offsets of the message, of the flag and of what the reader has found."""


@portable
def send_kernel(
    memory, BARRIER: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr, PAST_CACHES: tl.constexpr = False
):
    """Stores a message of four words, and raises a flag."""
    data = memory.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
    if PAST_CACHES:
        tl.store(data, 7, cache_modifier=".wt")
    else:
        tl.store(data, 7)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg((memory + 64).to(tl.pointer_type(tl.int32)), 1, sem=SEM, scope=SCOPE)


@portable
def take_kernel(memory, BARRIER: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """Waits for the flag, with two threads, and copies the message."""
    flag = (memory + 64).to(tl.pointer_type(tl.int32)) + tl.full((2,), 0, tl.int32)
    raised = tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE)
    while tl.reduce(raised, 0, tl.standard._elementwise_min) == 0:
        pause(0)
        raised = tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE)
    if BARRIER:
        tl.debug_barrier()
    words = tl.arange(0, 4)
    found = tl.load(memory.to(tl.pointer_type(tl.int32)) + words)
    tl.store((memory + 128).to(tl.pointer_type(tl.int32)) + words, found)


@portable
def poll_kernel(memory, VOLATILE: tl.constexpr):
    """Waits for the message itself."""
    data = memory.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
    found = tl.load(data, volatile=VOLATILE)
    while tl.reduce(found, 0, tl.standard._elementwise_min) == 0:
        pause(0)
        found = tl.load(data, volatile=VOLATILE)


@portable
def hand_on_kernel(memory, WAITS: tl.constexpr, FORM: tl.constexpr):
    """Stores the message plus one, once the launch before has ended if WAITS."""
    if WAITS:
        after_previous_launch()
    words = tl.arange(0, 4)
    found = tl.load(memory.to(tl.pointer_type(tl.int32)) + words)
    tl.store((memory + 128).to(tl.pointer_type(tl.int32)) + words, found + 1)


@portable
def early_kernel(memory, FORM: tl.constexpr):
    """Lets the next launch start, and stores the message."""
    allow_next_launch()
    pause(0)
    tl.store(memory.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4), 7)


class Form(NamedTuple):
    """The part of LaunchForm that launches depend on."""

    DEPENDENT_LAUNCH: bool = True


def pass_message(context: Context, sender: dict[str, object], taker: dict[str, object]) -> list[int]:
    """Rank 0 sends, and the last rank takes; what it has found."""
    memory = context.machine.pool.landed
    address = context.machine.pool.address
    if context.rank == 0:
        context.launch(send_kernel, 1, address, **sender)
    if context.rank == context.group.size - 1:
        if context.group.size == 1:
            context.stream.last = None  # another stream of this rank
        context.launch(take_kernel, 1, address, **taker)
        context.synchronize()
    return torch.from_numpy(memory[SEEN : SEEN + 16].copy()).view(torch.int32).tolist()


RELEASE = {"BARRIER": True, "SEM": "release", "SCOPE": "sys"}
ACQUIRE = {"BARRIER": True, "SEM": "acquire", "SCOPE": "sys"}


@pytest.mark.parametrize("landing", ["newest", "oldest", "random"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_released_and_acquired_message_is_seen(num_ranks, landing):
    run = simulate(num_ranks, pass_message, RELEASE, ACQUIRE, conditions=replace(LATE, landing=landing))
    assert run.results[-1] == [7] * 4


@pytest.mark.parametrize(
    ("sender", "taker"),
    [
        (RELEASE | {"SEM": "relaxed"}, ACQUIRE),
        (RELEASE | {"BARRIER": False}, ACQUIRE),
        (RELEASE, ACQUIRE | {"SEM": "relaxed"}),
        (RELEASE, ACQUIRE | {"BARRIER": False}),
    ],
)
def test_a_message_without_its_order_may_not_be_seen(sender, taker):
    run = simulate(2, pass_message, sender, taker, conditions=LATE)
    assert run.results[-1] == [0] * 4


def test_a_release_of_gpu_scope_reaches_the_own_rank_only():
    sender = RELEASE | {"SCOPE": "gpu"}
    assert simulate(1, pass_message, sender, ACQUIRE, conditions=LATE).results == [[7] * 4]
    with pytest.raises(MixedScopes):
        simulate(2, pass_message, sender, ACQUIRE, conditions=LATE)


def test_an_acquire_of_gpu_scope_meets_no_flag_of_another_rank():
    with pytest.raises(MixedScopes):
        simulate(2, pass_message, RELEASE, ACQUIRE | {"SCOPE": "gpu"}, conditions=LATE)


@pytest.mark.parametrize("past_caches", [False, True])
def test_a_store_past_the_caches_lands_while_its_launch_runs(past_caches):
    def poll_beside(context: Context) -> bool:
        address, taken = context.machine.pool.address, context.machine.pool.landed
        if context.rank == 1:
            context.launch(poll_kernel, 1, address, VOLATILE=True)
            context.synchronize()
            taken[FLAG + 4] = 1
            return True
        # its launch ends when the other rank has the message
        context.launch(endless_kernel, 1, address, PAST_CACHES=past_caches)
        context.machine.scheduler.sleep(1.0)
        seen = bool(taken[FLAG + 4])
        taken[FLAG] = 1
        return seen

    assert simulate(2, poll_beside, conditions=LATE).results == [past_caches, True]


@portable
def endless_kernel(memory, PAST_CACHES: tl.constexpr):
    """Stores a message, and ends when the host says so."""
    data = memory.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
    if PAST_CACHES:
        tl.store(data, 7, cache_modifier=".wt")
    else:
        tl.store(data, 7)
    flag = (memory + 64).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") == 0:
        pause(0)


@pytest.mark.parametrize("waits", [False, True])
def test_a_dependent_launch_sees_the_one_before_if_it_waits(waits):
    def two_launches(context: Context) -> list[int]:
        pool = context.machine.pool
        context.launch(early_kernel, 1, pool.address, FORM=Form())
        context.launch(hand_on_kernel, 1, pool.address, WAITS=waits, FORM=Form())
        context.synchronize()
        return torch.from_numpy(pool.landed[SEEN : SEEN + 16].copy()).view(torch.int32).tolist()

    if waits:
        assert simulate(1, two_launches, conditions=LATE).results == [[8] * 4]
    else:
        # it has loaded what the launch before it is about to store
        with pytest.raises(Overtaken):
            simulate(1, two_launches, conditions=LATE)


@portable
def read_kernel(memory, SEM: tl.constexpr):
    """Loads the message, and raises a flag."""
    data = memory.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
    tl.store(data + 32, tl.load(data))
    tl.debug_barrier()
    tl.atomic_xchg((memory + 64).to(tl.pointer_type(tl.int32)), 1, sem=SEM, scope="sys")


@portable
def await_kernel(memory, SEM: tl.constexpr, STORES_AT: tl.constexpr):
    """Waits for the flag, and stores a message at that byte unless it is below 0."""
    while tl.atomic_add((memory + 64).to(tl.pointer_type(tl.int32)), 0, sem=SEM, scope="sys") == 0:
        pause(0)
    if STORES_AT >= 0:
        tl.store((memory + STORES_AT).to(tl.pointer_type(tl.int32)) + tl.arange(0, 4), 7)


@portable
def replace_kernel(memory, BARRIER: tl.constexpr):
    """Stores over a message that it has loaded."""
    data = memory.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4)
    found = tl.load(data)
    if BARRIER:
        tl.debug_barrier()
    tl.store(data, found + 1)


def overwrite_without_order(context: Context, release: str = "relaxed", acquire: str = "acquire") -> None:
    """Rank 0 loads a message, and rank 1 overwrites it behind a flag."""
    address = context.machine.pool.address
    if context.rank == 0:
        context.launch(read_kernel, 1, address, SEM=release)
    else:
        context.launch(await_kernel, 1, address, SEM=acquire, STORES_AT=0)
    context.synchronize()


@pytest.mark.parametrize(
    ("release", "acquire"), [("release", "acquire"), ("relaxed", "acquire"), ("release", "relaxed")]
)
def test_a_store_may_overtake_a_load_unless_it_is_ordered(release, acquire):
    if (release, acquire) == ("release", "acquire"):
        simulate(2, overwrite_without_order, release, acquire, conditions=LATE)
    else:
        with pytest.raises(Overtaken):
            simulate(2, overwrite_without_order, release, acquire, conditions=LATE)


@pytest.mark.parametrize(("num_before", "num_waiting"), [(1, 1), (0, 1), (1, 0)])
def test_a_relaxed_flag_orders_launches_before_it_ahead_of_launches_behind_it(num_before, num_waiting):
    def overwrite(context: Context) -> None:
        address = context.machine.pool.address
        if context.rank == 0:
            # the launch that loads is the one that posts, or one before it
            context.launch(read_kernel, 1, address + 256 * num_before, SEM="relaxed")
            context.launch(read_kernel, 1, address, SEM="relaxed") if num_before else None
        else:
            context.launch(await_kernel, 1, address, SEM="relaxed", STORES_AT=-1 if num_waiting else 256)
            context.launch(replace_kernel, 1, address + 256 * num_before, BARRIER=True) if num_waiting else None
        context.synchronize()

    if num_before and num_waiting:
        simulate(2, overwrite, conditions=LATE)
    else:
        with pytest.raises(Overtaken):
            simulate(2, overwrite, conditions=LATE)


@pytest.mark.parametrize("barrier", [False, True])
def test_a_program_may_overtake_its_own_loads_unless_a_barrier_lies_between(barrier):
    def overwrite(context: Context) -> None:
        context.launch(replace_kernel, 1, context.machine.pool.address, BARRIER=barrier)
        context.synchronize()

    if barrier:
        simulate(1, overwrite, conditions=LATE)
    else:
        with pytest.raises(Overtaken):
            simulate(1, overwrite, conditions=LATE)
