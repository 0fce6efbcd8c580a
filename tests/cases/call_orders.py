"""Bodies of the tests of orders of calls: lists of actions on three ops, right and wrong ones, against a model.

Run on every rank, with one list. Ops 0 and 2 share memory (one index), op 1 has its own, so that its steps may lie
between the calls of others. What the model calls wrong must raise the documented error and change nothing; what it
calls right is compared with the oracle.
"""

import gc
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ep_a2a.errors import AlternationError, ClosedError, EpA2AError, ForeignIndicesError, InputError, StateError
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, assert_same_memory, make_inputs, make_op, reference_of, run_step
from tests.cases.op_checks import raised, synchronize

INDEX_OF = (0, 1, 0)
NUM_OPS = len(INDEX_OF)
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
BAD_DISPATCHES = {"dtype", "width", "block_num", "pad_id"}
BAD_COMBINES = {"dtype", "rows", "block_num", "ids"}
GO_ON, GO_ON_IN_HALVES = "go on", "go on in halves"
OTHERS = ("check", "reset", "close", "drop", "build", "foreign ids")
CALLS = (*STAGE_OF, *OTHERS, *(f"bad {each}" for each in sorted(BAD_DISPATCHES | BAD_COMBINES)))


@dataclass(frozen=True)
class Action:
    """What is done to an op; the ranks that try it where it is wrong, all of them where it is right."""

    op: int
    call: str
    ranks: tuple[int, ...]


@dataclass
class OpModel:
    """What an op must be in now, on all ranks.

    Attributes:
        stage: the next call, as a key of NEXT. failed: ranks whose kernels have recorded a failure.
    """

    alive: bool = True
    stage: str = "dispatch"
    failed: frozenset[int] = frozenset()

    @property
    def is_open(self) -> bool:
        return self.stage != "dispatch"


@dataclass
class Ops:
    """Three ops on this rank, what they must be in, and their steps."""

    context: RankContext
    arena: Arena
    cases: tuple[Case, ...]
    ops: list[EpDispatchCombineOp | None] = field(default_factory=list)
    models: list[OpModel] = field(default_factory=list)
    steps: list[Step | None] = field(default_factory=lambda: [None] * NUM_OPS)
    numbers: list[int] = field(default_factory=lambda: [0] * NUM_OPS)
    promised: list[Any] = field(default_factory=lambda: [None] * NUM_OPS)
    spoilt: list[set[int]] = field(default_factory=lambda: [set() for _ in INDEX_OF])
    """Ranks on which the memory of an index was left in the middle of a step."""

    def __post_init__(self) -> None:
        self.ops = [self._make(which) for which in range(NUM_OPS)]
        self.models = [OpModel() for _ in range(NUM_OPS)]

    @property
    def rank(self) -> int:
        return self.context.rank

    def _make(self, which: int) -> EpDispatchCombineOp:
        return make_op(self.context, self.cases[which], self.arena, index=INDEX_OF[which])

    def _others_in_a_step(self, which: int) -> bool:
        return any(
            model.is_open
            for other, model in enumerate(self.models)
            if other != which and INDEX_OF[other] == INDEX_OF[which]
        )

    # --- what must come of a call ---

    def expected_error(self, which: int, call: str, rank: int) -> type[EpA2AError] | None:
        """The error that a rank must get, as the docstrings of EpDispatchCombineOp promise it."""
        model = self.models[which]
        if call == "bad block_num":
            return InputError
        if not model.alive:
            return ClosedError
        if call == "reset":
            return None
        if rank in model.failed:
            return ForeignIndicesError
        stage = STAGE_OF.get(call, call)
        if call.startswith("bad "):
            stage = model.stage
        elif call == "foreign ids":
            stage = "combine"
        if call == "check":
            return None
        if stage != model.stage:
            return AlternationError
        if stage == "dispatch" and call.startswith("bad "):
            return InputError
        if stage == "dispatch" and rank in self.spoilt[INDEX_OF[which]]:
            return StateError
        if stage == "dispatch" and self._others_in_a_step(which):
            return AlternationError
        if call.startswith("bad "):
            return ForeignIndicesError if call == "bad ids" else InputError
        return None

    # --- doing it ---

    def do(self, action: Action) -> None:
        """One action, on whichever ranks can do it."""
        which, model = action.op, self.models[action.op]
        call = self._resolved(action)
        if call is None:
            return
        if call in ("close", "drop", "build"):
            getattr(self, call)(which)
            return
        errors = [self.expected_error(which, call, rank) for rank in range(self.context.world_size)]
        if not any(errors):
            getattr(self, call.replace(" ", "_"))(which)
            return
        # those who could go on would wait for those who cannot
        error = errors[self.rank]
        if error is None or self.rank not in action.ranks:
            return
        op = self.ops[which]
        if op is None:
            return
        before, was_open = op.memory.steps.clone(), op.has_open_step
        # a call at another's place names the one that is next
        is_early = error is AlternationError and STAGE_OF.get(call, model.stage) != model.stage
        words = (f"{model.stage} next", f"got {call}") if is_early else ()
        raised(error, lambda: self._attempt(op, which, call), *words)
        assert op.memory.steps.equal(before), f"{call} has launched something"
        assert op.has_open_step == was_open
        assert op.has_open_step == (model.is_open and model.alive)

    def _resolved(self, action: Action) -> str | None:
        """The call that an action stands for; None where it makes no sense."""
        call, model = action.call, self.models[action.op]
        if call in (GO_ON, GO_ON_IN_HALVES):
            if not model.alive:
                return "build"
            if model.failed or self.spoilt[INDEX_OF[action.op]]:
                return None if self._others_in_a_step(action.op) else "reset"
            return NEXT[model.stage][call == GO_ON_IN_HALVES]
        if call.startswith("bad ") and model.stage in ("dispatch_recv", "combine_recv"):
            return None
        if call.startswith("bad ") and call[4:] not in (BAD_DISPATCHES if model.stage == "dispatch" else BAD_COMBINES):
            return None
        # of ops that share memory nobody may reset one in another's step
        if call == "reset" and self._others_in_a_step(action.op):
            return None
        return call

    def _attempt(self, op: EpDispatchCombineOp, which: int, call: str) -> Any:
        """A call that must raise."""
        case, device = self.cases[which], self.context.device
        mine = make_inputs(case, self.numbers[which], self.rank)
        x, ids = mine.tokens.to(device), mine.ids.to(device)
        weights = None if mine.weights is None else mine.weights.to(device)
        scales = None if mine.scales is None else mine.scales.to(device)
        stride = case.stride(self.numbers[which])
        kind = call[4:] if call.startswith("bad ") else ""
        if call in ("check", "reset", "dispatch_recv", "combine_recv"):
            return getattr(op, call)()
        if call in ("dispatch", "dispatch_send"):
            return getattr(op, call)(x, weights, scales, ids, step_tokens=stride)
        step = self.steps[which]
        if kind and self.models[which].stage == "dispatch":
            x = x.to(torch.float64) if kind == "dtype" else torch.cat([x, x], 1) if kind == "width" else x
            options = {"block_num": 1 << 40} if kind == "block_num" else {}
            pad_id = 1 << 40 if kind == "pad_id" else -1
            return op.dispatch(x, weights, scales, ids, **options, step_tokens=stride, pad_id=pad_id)
        lead = (1,) if step is None or step.got is None else step.got[0].shape[:-1]
        rows = torch.zeros(*lead, case.hidden_dim, dtype=op.config.combined_dtype, device=device)
        if kind == "ids":
            return op.combine(rows, None, torch.zeros(case.max_tokens + 1, case.topk, dtype=torch.int32, device=device))
        rows = rows.to(torch.float64) if kind == "dtype" else rows.flatten(0, -2)[1:] if kind == "rows" else rows
        options = {"block_num": 1 << 40} if kind == "block_num" else {}
        method = op.combine if kind or call == "foreign ids" else getattr(op, call)
        return method(rows, None, None, **options)

    # --- right calls, one method each ---

    def check(self, which: int) -> None:
        self.ops[which].check()

    def reset(self, which: int) -> None:
        self.ops[which].reset()
        self.models[which] = OpModel()
        self.steps[which] = None
        self.spoilt[INDEX_OF[which]].clear()

    def build(self, which: int) -> None:
        """Where there is an op of this kind, no second one; else a new one, on all ranks together."""
        if self.models[which].alive:
            raised(StateError, lambda: self._make(which), "close it first")
            return
        self.ops[which] = self._make(which)
        self.models[which] = OpModel()
        self.spoilt[INDEX_OF[which]].clear()

    def close(self, which: int) -> None:
        model, op = self.models[which], self.ops[which]
        if op is not None:
            op.close()
        if model.alive:
            everyone = set(range(self.context.world_size))
            self.spoilt[INDEX_OF[which]] |= everyone if model.is_open else set(model.failed)
        self._gone(which)

    def drop(self, which: int) -> None:
        """Lets garbage collection take the op, closed or not."""
        model = self.models[which]
        if model.alive and model.is_open:
            self.spoilt[INDEX_OF[which]] |= set(range(self.context.world_size))
        self.ops[which] = None
        self._gone(which)

    def _gone(self, which: int) -> None:
        self.models[which] = OpModel(alive=False)
        self.steps[which] = self.promised[which] = None
        gc.collect()

    def dispatch(self, which: int) -> None:
        self.steps[which] = Step.dispatch(self._whole(which), self.ops[which], self.numbers[which], self.context.device)
        self._dispatched(which)

    def dispatch_send(self, which: int) -> None:
        case, number = self.cases[which], self.numbers[which]
        everyone = [make_inputs(case, number, rank) for rank in range(case.world_size)]
        mine, device = everyone[self.rank], self.context.device
        tensors = [None if t is None else t.to(device) for t in (mine.tokens, mine.weights, mine.scales, mine.ids)]
        promised = self.ops[which].dispatch_send(*tensors, step_tokens=case.stride(number), pad_id=case.pad_id)
        counts = [each.tokens.shape[0] for each in everyone]
        ids = tensors[3]
        reference = reference_of(case, number, everyone)
        self.steps[which] = Step(case, self.ops[which], number, device, ids, counts, reference, promised)
        # until dispatch_recv what was sent must stay
        self.promised[which] = tensors
        self._end(which, "dispatch_send")

    def dispatch_recv(self, which: int) -> None:
        step = self.steps[which]
        got = self.ops[which].dispatch_recv()
        assert_same_memory(step.got, got)
        self._dispatched(which)

    def _dispatched(self, which: int) -> None:
        step = self.steps[which]
        step.check_dispatched()
        self.promised[which] = None
        self._end(which, "dispatch")

    def combine(self, which: int) -> None:
        # other ops' calls have come since
        self.steps[which].check_dispatched()
        self.steps[which].combine()
        self._end(which, "combine")

    def foreign_ids(self, which: int) -> None:
        """Ids that this rank's dispatch did not get: the sums are right, and the op fails where there is a token."""
        step, op = self.steps[which], self.ops[which]
        rows, weights, expected, sums = step.before_combine()
        got = op.combine(rows, weights, step.ids + 1)
        synchronize(self.context)
        step.check_combined(got, expected, sums)
        self._end(which, "combine")
        self.models[which].failed = frozenset(rank for rank, count in enumerate(step.counts) if count)

    def combine_send(self, which: int) -> None:
        step = self.steps[which]
        step.check_dispatched()
        rows, weights, expected, sums = step.before_combine()
        self.promised[which] = step.combine_send(rows, weights), expected, sums
        self._end(which, "combine_send")

    def combine_recv(self, which: int) -> None:
        promised, expected, sums = self.promised[which]
        got = self.ops[which].combine_recv()
        assert_same_memory(promised, got)
        self.steps[which].check_combined(got, expected, sums)
        self._end(which, "combine_recv")

    def _end(self, which: int, call: str) -> None:
        self.models[which].stage = AFTER[call]
        if AFTER[call] == "dispatch":
            self.steps[which] = self.promised[which] = None
            self.numbers[which] += 1

    def _whole(self, which: int) -> Case:
        return replace(self.cases[which], split="")

    # --- the end ---

    def recover(self) -> None:
        """Ends or resets every step, builds what is gone, and runs a step of each op."""
        for which in range(NUM_OPS):
            while self.models[which].is_open and not self.models[which].failed:
                self.do(Action(which, GO_ON, ()))
        for which, model in enumerate(self.models):
            if not model.alive:
                self.build(which)
            elif model.failed or self.spoilt[INDEX_OF[which]]:
                self.reset(which)
        for which in range(NUM_OPS):
            run_step(self._whole(which), self.ops[which], self.numbers[which], self.context.device)
            self.ops[which].check()


def three_cases(case: Case) -> tuple[Case, ...]:
    """The cases of three ops that differ in data, and in shape where they share memory."""
    case = replace(case, split="")
    return case, replace(case, seed=case.seed + 1), replace(case, seed=case.seed + 2, topk=case.topk + 1)


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
    " 2:reset 2:dispatch 2:combine 2:dispatch 2:combine 0:build 0:dispatch 0:combine 0:close 2:dispatch 2:combine",
}
"""Orders by name: "op:call" one after another. Ops 0 and 2 share memory.

a: op 1 on even ranks, op 2 on odd ones; b: the other one.
"""


def run_order(context: RankContext, case: Case, name: str) -> None:
    """An order of ORDERS on all ranks."""
    everyone, is_odd = tuple(range(context.world_size)), context.rank % 2
    numbers = {"0": 0, "1": 1, "2": 2, "a": 1 + is_odd, "b": 2 - is_odd}
    actions = [each.split(":") for each in ORDERS[name].split()]
    run_actions(context, case, [Action(numbers[which], call, everyone) for which, call in actions])


def run_actions(context: RankContext, case: Case, actions: list[Action]) -> None:
    """All actions in order; then every op must work."""
    with Arena(context.group, context.device) as arena:
        ops = Ops(context, arena, three_cases(case))
        for place, action in enumerate(actions):
            try:
                ops.do(action)
            except BaseException as error:
                error.add_note(f"action {place}: {action}; models {ops.models}")
                raise
        ops.recover()
