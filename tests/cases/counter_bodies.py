"""Bodies of tests of counted steps, run on every rank: against rows that are counted here, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ep_a2a import clock
from ep_a2a.memory.arena import Arena
from ep_a2a.telemetry.counters import InstrumentedOp, StepCounters
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Inputs, make_inputs, make_op, read_bodies, same_bits
from tests.cases.op_checks import synchronize
from tests.late import await_others, tell
from tests.replay import CapturedStep

LATE_SECS = 2.0
LONG_SECS = 0.9 * LATE_SECS
"""A wait for the late rank is longer; one for nobody is far shorter."""
WAITS = ("dispatch_wait_us", "combine_wait_us")
CAST_SCALE_BYTES = 4


def inputs_of(case: Case, number: int, rank: int) -> Inputs:
    """As make_inputs, with ids that are dropped: of every third token one, of every seventh all."""
    inputs = make_inputs(case, number, rank)
    inputs.ids[::3, 0] = -1
    inputs.ids[::7] = case.num_experts
    return inputs


def rows_between_ranks(case: Case, everyone: Sequence[Inputs]) -> list[list[int]]:
    """[source][destination]: tokens of the source with an expert at the destination."""
    owners: list[int] = []
    for rank in range(case.world_size):
        owners += [rank] * (case.num_experts // case.world_size + (rank < case.num_experts % case.world_size))
    rows = [[0] * case.world_size for _ in range(case.world_size)]
    for source, inputs in enumerate(everyone):
        for ids in inputs.ids.tolist():
            for destination in {owners[expert] for expert in ids if 0 <= expert < case.num_experts}:
                rows[source][destination] += 1
    return rows


def expected_values(case: Case, everyone: Sequence[Inputs], rank: int) -> dict[str, Any]:
    """What a step counts on a rank, but for the waits."""
    rows, ranks = rows_between_ranks(case, everyone), range(case.world_size)
    sent = sum(rows[rank]) - rows[rank][rank]
    received = sum(rows[source][rank] for source in ranks) - rows[rank][rank]
    dispatched = combined = case.hidden_dim * case.dtype.itemsize
    if case.quant_type == "fp8_per_1x128":
        dispatched = case.hidden_dim + case.hidden_dim // 128 * CAST_SCALE_BYTES
    if case.quant_type == "fp8_blockwise":
        combined = case.hidden_dim + case.hidden_dim // 128 * CAST_SCALE_BYTES
    by_rank = [sum(rows[source][each] for source in ranks) for each in ranks]
    mean = sum(by_rank) / case.world_size
    return {
        "num_tokens": len(everyone[rank].ids),
        "num_kept_rows": rows[rank][rank],
        "num_sent_rows": sent,
        "num_received_rows": received,
        "sent_bytes": sent * dispatched + received * combined,
        "received_bytes": received * dispatched + sent * combined,
        "rank_rows": mean,
        "skew_rows": max(by_rank) - mean,
    }


def check_counted(got: dict[str, Any], expected: list[dict[str, Any]], num_kept_steps: int) -> None:
    """What a layer has read against its steps."""
    assert got["num_steps"] == len(expected)
    first = max(0, len(expected) - num_kept_steps)
    assert [each["step"] for each in got["latest_steps"]] == list(range(first + 1, len(expected) + 1))
    for each, values in zip(got["latest_steps"], expected[first:]):
        assert_close({name: each[name] for name in values}, values)
        assert all(each[name] > 0 for name in WAITS)
        assert set(each) == {"step", *values, *WAITS}
    names = expected[0] if expected else ()
    assert_close({name: got[name] for name in names}, {name: sum(each[name] for each in expected) for name in names})
    assert_close({"": got["max_skew_rows"]}, {"": max((each["skew_rows"] for each in expected), default=0)})
    for name in WAITS:
        kept = [each[name] for each in got["latest_steps"]]
        assert got[f"max_{name}"] >= max(kept, default=0)
        assert got[name] >= sum(kept) * (1 - 1e-9)


def assert_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: round(value, 6) for name, value in got.items()} == {
        name: round(value, 6) for name, value in expected.items()
    }


def _on(context: RankContext, inputs: Inputs) -> list[Any]:
    tensors = (inputs.tokens, inputs.weights, inputs.scales, inputs.ids)
    return [None if tensor is None else tensor.to(context.device, copy=True) for tensor in tensors]


def _experts(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a rank's experts make of its rows; rows without a token may hold anything."""
    return (tokens.float().nan_to_num() * 0.5).to(dtype)


def _step(caller: Any, case: Case, number: int, given: list[Any], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """One step: copies of the received ids and of the result."""
    tokens, _, _, ids, _ = caller.dispatch(*given, max_num_tokens=case.stride(number))
    received = ids.clone()
    result, _ = caller.combine(_experts(tokens, dtype), None, None)
    return received, result[: len(given[0])].clone()


def counted(context: RankContext, case: Case) -> None:
    """Two layers of one op; the results are those of uncounted calls, bit for bit."""
    num_kept_steps = 2
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        exchanges = [InstrumentedOp(op, StepCounters(context.device, num_kept_steps)) for _ in range(2)]
        num_bytes = arena.num_bytes
        expected: list[list[dict[str, Any]]] = [[], []]
        for number in range(case.num_steps):
            everyone = [inputs_of(case, number, rank) for rank in range(case.world_size)]
            given = _on(context, everyone[context.rank])
            plain = _step(op, case, number, given, op.config.combined_dtype)
            for layer in (0, 1) if number % 2 else (0,):
                got = _step(exchanges[layer], case, number, given, op.config.combined_dtype)
                for what, mine, right in zip(("ids", "result"), got, plain):
                    same_bits(mine, right.cpu(), what)
                expected[layer].append(expected_values(case, everyone, context.rank))
        for exchange, steps in zip(exchanges, expected):
            check_counted(exchange.counters.read(op.config), steps, num_kept_steps)
        exchanges[0].counters.clear()
        check_counted(exchanges[0].counters.read(op.config), [], num_kept_steps)
        check_counted(exchanges[1].counters.read(op.config), expected[1], num_kept_steps)
        assert arena.num_bytes == num_bytes
        op.check()


def counted_by_one_rank(context: RankContext, case: Case) -> None:
    """Ranks that count work with ranks that do not."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        exchange = InstrumentedOp(op, StepCounters(context.device, 4)) if context.rank == 0 else op
        steps = []
        for number in range(3):
            everyone = [inputs_of(case, number, rank) for rank in range(case.world_size)]
            _step(exchange, case, number, _on(context, everyone[context.rank]), op.config.combined_dtype)
            steps.append(expected_values(case, everyone, context.rank))
        if isinstance(exchange, InstrumentedOp):
            check_counted(exchange.counters.read(op.config), steps, 4)


def counted_replays(context: RankContext, case: Case) -> None:
    """A captured step counts each time that it is replayed, with the ids of that time."""
    num_kept_steps, num_replays = 3, 5
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        exchange = InstrumentedOp(op, StepCounters(context.device, num_kept_steps))
        # the tensors that the capture reads keep their shapes
        same_sizes = replace(case, tokens=(case.tokens[0],))
        steps = [
            [inputs_of(same_sizes, number, rank) for rank in range(case.world_size)] for number in range(num_replays)
        ]
        static = _on(context, steps[0][context.rank])
        rows: list[torch.Tensor] = []

        def body(call: Callable[[Callable[[], None]], None]) -> None:
            tokens = exchange.dispatch(*static, max_num_tokens=case.stride(0))[0]
            rows.append(torch.zeros(tokens.shape, dtype=op.config.combined_dtype, device=context.device))
            call(lambda: None)
            exchange.combine(rows[0], None, None)

        captured = CapturedStep(op, body, (exchange,))
        exchange.counters.clear()
        for number, everyone in enumerate(steps):
            for target, source in zip(static, _on(context, everyone[context.rank])):
                if target is not None:
                    target.copy_(source)
            captured.replay()
            synchronize(context)
            done = [expected_values(same_sizes, each, context.rank) for each in steps[: number + 1]]
            check_counted(exchange.counters.read(op.config), done, num_kept_steps)
            arena.rendezvous.barrier("replay counted")
        op.check()


def waits_of_a_late_rank(context: RankContext, case: Case) -> None:
    """Those who wait for the late rank say so, and the late one does not.

    It comes LATE_SECS after the others have begun to wait: by the simulated clock, or on GPUs, whose clock measures the
    waits, by that of the host. What they send to it has left by then.
    """
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        exchange = InstrumentedOp(op, StepCounters(context.device, 4))
        given = _on(context, inputs_of(case, 0, context.rank))
        late = case.world_size - 1
        start_wait = exchange.engine.start_wait

        def before(call: str, place: str) -> None:
            def start_and_say() -> None:
                start_wait()
                tell(context, f"a late {place}")

            exchange.engine.start_wait = start_wait
            if call == place and context.rank != late:
                exchange.engine.start_wait = start_and_say
            elif call == place:
                await_others(context, f"a late {place}")
                clock.sleep(LATE_SECS)

        for place in ("", "dispatch", "combine"):
            before("dispatch", place)
            tokens = exchange.dispatch(*given)[0]
            rows = torch.zeros(tokens.shape, dtype=op.config.combined_dtype, device=context.device)
            synchronize(context)
            before("combine", place)
            exchange.combine(rows, None, None)
            synchronize(context)
            arena.rendezvous.barrier("step ended")
        got = exchange.counters.read(op.config)
        for name, step in zip(WAITS, got["latest_steps"][1:]):
            waited_secs = step[name] / 1e6
            assert (waited_secs < LONG_SECS) == (context.rank == late), (name, waited_secs)
            # which step that is depends on the machine, too
            assert got[f"max_{name}"] == max(each[name] for each in got["latest_steps"])


COUNTER_BODIES = read_bodies("counter_bodies", globals())
