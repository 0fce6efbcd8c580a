"""Orders of calls, right and wrong ones, of three ops against a model; run on every rank, with one list of actions.

Ops 0 and 2 share memory (one index), op 1 has its own, so that its steps may lie between the calls of others. What the
model calls wrong must raise the documented error and change nothing; what it calls right is compared with the oracle.
"""

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_a2a.errors import AlternationError, ClosedError, EpA2AError, StateError
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, arena_of, make_op, run_step
from tests.cases.op_checks import raised, refused

INDEX_OF = (0, 1, 0)
NEXT = {
    "dispatch": ("dispatch", "dispatch_send"),
    "dispatch_recv": ("dispatch_recv",) * 2,
    "combine": ("combine", "combine_send"),
    "combine_recv": ("combine_recv",) * 2,
}
"""The call that is next, whole and as a half."""
AFTER = {
    "dispatch": "combine",
    "dispatch_send": "dispatch_recv",
    "dispatch_recv": "combine",
    "combine": "dispatch",
    "combine_send": "combine_recv",
    "combine_recv": "dispatch",
}
STAGE_OF = {call: stage for stage, calls in NEXT.items() for call in calls}
GO_ON, GO_ON_IN_HALVES = "go_on", "go_on_in_halves"
OTHERS = ("check", "reset", "close", "drop", "build")
CALLS = (*STAGE_OF, *OTHERS)
Action = tuple[int, str]
"""The number of an op, and what is done to it."""


@dataclass
class Slot:
    """An op on this rank, or where one was; what it must be in; its step.

    Attributes:
        stage: the next call, as a key of NEXT. number: of the next step. spoilt: shared by the ops of an index:
            whether a step was left in the middle of its memory.
    """

    case: Case
    index: int
    spoilt: list[bool]
    op: EpDispatchCombineOp | None = None
    alive: bool = False
    stage: str = "dispatch"
    number: int = 0
    step: Step | None = None

    @property
    def is_open(self) -> bool:
        """Whether the op has an open step."""
        return self.alive and self.stage != "dispatch"


class Ops:
    """Three ops on this rank."""

    def __init__(self, context: RankContext, arena: Arena, case: Case) -> None:
        self.context, self.arena = context, arena
        case, spoilt = replace(case, split=""), ([False], [False])
        # they differ in data, and in shape where they share memory
        cases = case, replace(case, seed=case.seed + 1), replace(case, seed=case.seed + 2, topk=case.topk + 1)
        self.slots = [Slot(each, index, spoilt[index]) for each, index in zip(cases, INDEX_OF)]
        for slot in self.slots:
            self.build(slot)

    def _others_in_a_step(self, slot: Slot) -> bool:
        return any(each.is_open for each in self.slots if each is not slot and each.index == slot.index)

    def expected_error(self, slot: Slot, call: str) -> type[EpA2AError] | None:
        """The error that a call must get, as the docstrings of EpDispatchCombineOp promise it."""
        if not slot.alive:
            return ClosedError
        if call in ("check", "reset"):
            return None
        if STAGE_OF[call] != slot.stage:
            return AlternationError
        if slot.stage == "dispatch" and slot.spoilt[0]:
            return StateError
        return AlternationError if slot.stage == "dispatch" and self._others_in_a_step(slot) else None

    def do(self, place: int, which: int, call: str) -> None:
        """The action at a place of the list; every other rank tries what must be refused.

        A reset tells others of its error, so that all try it.
        """
        slot = self.slots[which]
        if call in (GO_ON, GO_ON_IN_HALVES):
            call = NEXT[slot.stage][call == GO_ON_IN_HALVES] if slot.alive else "build"
            if call in NEXT["dispatch"] and slot.spoilt[0]:
                call = "reset"
        # of ops that share memory nobody may reset one in another's step
        if call == "reset" and self._others_in_a_step(slot):
            return
        error = self.expected_error(slot, call) if call not in ("close", "drop", "build") else None
        if error is None and call in STAGE_OF:
            self.go_on(slot, call)
        elif error is None:
            getattr(self, call)(slot)
        elif slot.op is not None and (call == "reset" or (place + self.context.rank) % 2):
            self._refused(slot, call, error)

    def _refused(self, slot: Slot, call: str, error: type[EpA2AError]) -> None:
        def attempt() -> None:
            self._attempt(slot, call)

        if not slot.alive:
            raised(error, attempt)
            return
        # a call at another's place names the one that is next
        is_early = error is AlternationError and STAGE_OF[call] != slot.stage
        refused(slot.op, error, attempt, *((f"{slot.stage} next", f"got {call}") if is_early else ()))
        assert slot.op.has_open_step == slot.is_open

    def _attempt(self, slot: Slot, call: str) -> Any:
        """A call that must raise."""
        op, case = slot.op, slot.case
        if call.startswith("dispatch") and call != "dispatch_recv":
            return Step.begin(case, op, slot.number, self.context.device, half=call == "dispatch_send")
        rows = torch.zeros(1, case.hidden_dim, dtype=op.config.combined_dtype, device=self.context.device)
        return getattr(op, call)(*(rows, None, None) if call in ("combine", "combine_send") else ())

    # --- right calls ---

    def go_on(self, slot: Slot, call: str) -> None:
        """The next call of a step."""
        device = self.context.device
        if STAGE_OF[call] == "dispatch":
            slot.step = Step.begin(slot.case, slot.op, slot.number, device, half=call == "dispatch_send")
        elif call == "combine":
            # other ops' calls have come since
            slot.step.check_dispatched()
            slot.step.combine()
        else:
            getattr(slot.step, call)()
        slot.stage = AFTER[call]
        if slot.stage == "combine":
            slot.step.check_dispatched()
        slot.number += slot.stage == "dispatch"

    def check(self, slot: Slot) -> None:
        slot.op.check()

    def reset(self, slot: Slot) -> None:
        slot.op.reset()
        slot.stage, slot.step, slot.spoilt[0] = "dispatch", None, False

    def build(self, slot: Slot) -> None:
        """A new op on all ranks together; no second one beside one of the same kind."""
        if slot.alive:
            raised(StateError, lambda: make_op(self.context, slot.case, self.arena, index=slot.index), "close it first")
            return
        slot.op = make_op(self.context, slot.case, self.arena, index=slot.index)
        slot.alive, slot.stage, slot.spoilt[0] = True, "dispatch", False

    def close(self, slot: Slot) -> None:
        if slot.op is not None:
            slot.op.close()
        self._gone(slot)

    def drop(self, slot: Slot) -> None:
        """Lets garbage collection take the op, closed or not."""
        slot.op = None
        self._gone(slot)

    def _gone(self, slot: Slot) -> None:
        slot.spoilt[0] |= slot.is_open
        slot.alive, slot.step = False, None
        gc.collect()

    def recover(self) -> None:
        """Ends every step, builds what is gone, and runs a step of each op."""
        for slot in self.slots:
            while slot.is_open:
                self.go_on(slot, NEXT[slot.stage][0])
        for slot in self.slots:
            if not slot.alive:
                self.build(slot)
            elif slot.spoilt[0]:
                self.reset(slot)
        for slot in self.slots:
            run_step(slot.case, slot.op, slot.number, self.context.device)
            slot.op.check()


def _everywhere(*calls: str) -> str:
    """An order in which each call comes after all that are wrong in its place."""
    order = []
    for call in calls:
        order += [each for each in STAGE_OF if STAGE_OF[each] != STAGE_OF[call]] + [call]
    return " ".join(f"0:{each}" for each in order)


HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
ORDERS = {
    "of-calls": f"{_everywhere(*HALVES)} 0:dispatch_send 0:reset {_everywhere(*HALVES)}"
    " 0:dispatch 0:combine_send 0:reset",
    # the ranks need not receive in the order in which they have sent
    "overlapping-halves": (
        "1:dispatch_send 2:dispatch_send a:dispatch_recv b:dispatch_recv"
        " 1:combine_send 2:combine_send a:combine_recv b:combine_recv"
        " 2:dispatch_send 1:dispatch_send b:dispatch_recv a:dispatch_recv"
        " 2:combine_send 1:combine_send b:combine_recv a:combine_recv "
    )
    * 2,
    "interleaved": "0:dispatch 1:dispatch 2:dispatch 0:combine 1:combine " * 3,
    # what a step left is found by the ops that share its memory, and mended by construction or reset
    "closed-in-the-middle": "0:dispatch 0:combine 2:dispatch 2:combine 0:dispatch 0:close 2:dispatch 2:dispatch"
    " 1:dispatch 1:combine 0:build 2:dispatch 2:combine 0:dispatch 0:combine_send 0:close 2:dispatch 2:dispatch"
    " 2:reset 2:dispatch 2:combine 2:dispatch 2:combine 0:build 0:dispatch 0:combine 0:close 2:dispatch 2:combine"
    " 0:build 0:dispatch 0:drop 2:dispatch 2:dispatch 2:reset 2:dispatch 2:combine",
}
"""Orders by name: "op:call" one after another. Ops 0 and 2 share memory.

a: op 1 on even ranks, op 2 on odd ones; b: the other one.
"""


def run_order(context: RankContext, case: Case, order: str) -> None:
    """An order of ORDERS on all ranks."""
    is_odd = context.rank % 2
    numbers = {"0": 0, "1": 1, "2": 2, "a": 1 + is_odd, "b": 2 - is_odd}
    actions = [each.split(":") for each in ORDERS[order].split()]
    run_actions(context, case, [(numbers[which], call) for which, call in actions])


def run_actions(context: RankContext, case: Case, actions: list[Action]) -> None:
    """All actions in order; then every op must work."""
    with arena_of(context, case) as arena:
        ops = Ops(context, arena, case)
        for place, action in enumerate(actions):
            try:
                ops.do(place, *action)
            except BaseException as error:
                error.add_note(f"action {place}: {action}; {[(each.alive, each.stage) for each in ops.slots]}")
                raise
        ops.recover()
