"""Bodies of the tests of Triton-distributed's layer, for CPU processes and for GPUs alike, against the oracle."""

from dataclasses import replace
from typing import Any, Self

import torch

from ep_a2a import errors, shmem
from ep_a2a.compat.triton_distributed import EPLowLatencyAllToAllLayer, create_ep_ll_a2a_ctx
from ep_a2a.config import FP8_DTYPE
from ep_a2a.memory.arena import Arena
from ep_a2a.quantization import quantize, quantize_groups
from ep_a2a.routing import expert_ranges
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, check_expert_rows, make_inputs, reference_of, same_bits, same_sums
from tests.cases.op_checks import raised, synchronize
from tests.cases.staged_cases import on_hosts

SHORT_TIMEOUT_SECS, ENOUGH_SECS = 1.0, 60.0
BASE = Case(
    world_size=2,
    num_experts=6,
    max_tokens=4,
    layout="expert_major",
    hidden_dim=32,
    tokens=((4, 3), (0, 3), (1, 0)),
    num_steps=3,
)
ONE_STEP = replace(BASE, num_steps=1)
FP8 = replace(ONE_STEP, hidden_dim=256, quant_type="fp8_per_1x128")
ON_TWO_NODES = replace(FP8, world_size=4, num_experts=12, tokens=((4, 0, 3, 1),), num_nodes=2)
CASES = {
    "bf16": BASE,
    "fp8": FP8,
    "fp8-per_token": replace(FP8, quant_type="fp8_per_token", hidden_dim=48, dtype=torch.float32),
    "cast already": replace(ONE_STEP, dtype=FP8_DTYPE, scale_dim=2),
    "float32-dropped": replace(ONE_STEP, dtype=torch.float32, routing="some_dropped", topk=3),
    # rank 1 receives nothing, brings nothing, or both
    "all to rank 0": replace(FP8, routing="all_to_one", tokens=((3, 0), (2, 3), (0, 0)), num_steps=3),
    # more than a flagged dispatch takes
    "many tokens": replace(ONE_STEP, max_tokens=160, tokens=((9, 2),), num_experts=2),
}


def make_layer(context: RankContext, case: Case, arena: Arena | None, **changes: Any) -> EPLowLatencyAllToAllLayer:
    group_size = {"fp8_per_token": case.hidden_dim, "fp8_per_1x128": 128}.get(case.quant_type)
    values: dict[str, Any] = {
        "max_m": case.max_tokens,
        "hidden": case.hidden_dim,
        "topk": case.topk,
        "online_quant_fp8": case.quant_type != "none",
        "rank": context.rank,
        "num_experts": case.num_experts,
        "local_world_size": case.world_size // case.num_nodes,
        "world_size": case.world_size,
        "dtype": case.dtype,
        "fp8_gsize": group_size or case.hidden_dim // (case.scale_dim or 1),
        "arena": arena,
    }
    return EPLowLatencyAllToAllLayer(**{**values, **changes})


class LayerStep(Step):
    """One step of a case on this rank, between its dispatch and its combine, by the layer's calls."""

    layer: EPLowLatencyAllToAllLayer
    weights: torch.Tensor
    with_dispatch: bool

    @classmethod
    def of(
        cls,
        case: Case,
        layer: EPLowLatencyAllToAllLayer,
        number: int,
        context: RankContext,
        *,
        with_dispatch: bool = False,
        cast_before: bool = False,
    ) -> Self:
        """Dispatches. with_dispatch: gives it the weights. cast_before: tokens of a layer that casts come cast."""
        everyone = [make_inputs(case, number, rank) for rank in range(case.world_size)]
        mine = everyone[context.rank]
        tokens, scales = quantize(mine.tokens, case.quant_type) if cast_before else (mine.tokens, mine.scales)
        scales = None if scales is None else scales.to(context.device)
        ids, weights = mine.ids.to(context.device), mine.weights.to(context.device)
        op, counts = layer.dispatch_ctx.buffers.op, [each.tokens.shape[0] for each in everyone]
        given = {"send_tokens": tokens.to(context.device), "send_scales": scales, "topk_indices": ids}
        got = layer.dispatch(**given, topk_weights=weights) if with_dispatch else layer.dispatch(**given)
        step = cls(case, op, number, context.device, ids, counts, reference_of(case, number, everyone), got)
        step.layer, step.weights, step.with_dispatch = layer, weights, with_dispatch
        return step

    def check_dispatched(self) -> None:
        tokens, scales, counts, meta = self.got
        expected, case = self.reference[self.op.config.rank], self.case
        check_expert_rows(case, self.op, (tokens, None, scales), replace(expected, weights=None))
        same_bits(counts, expected.expert_counts, "counts")
        check_sources(
            case,
            self.number,
            self.op.config.rank,
            meta.recv_token_source_indices,
            meta.recv_token_source_count_and_start,
        )

    def experts(self) -> torch.Tensor:
        """What this rank's experts return."""
        return self.before_combine()[0]

    def result(self) -> torch.Tensor:
        """What combine returns."""
        weights = None if self.with_dispatch else self.weights
        return self.layer.combine(
            send_tokens=self.experts(), topk_indices=self.ids, topk_weights=weights, dispatch_meta=self.got[3]
        )

    def check_result(self, got: torch.Tensor) -> None:
        same_sums(got, self.before_combine()[2], f"combine {self.number}")


def check_sources(case: Case, number: int, rank: int, indices: torch.Tensor, packed: torch.Tensor) -> None:
    """Where each row of a rank's experts comes from: its token, and each source's first row and number of rows."""
    first, last = expert_ranges(case.num_experts, case.world_size)[rank]
    ids = [make_inputs(case, number, source).ids for source in range(case.world_size)]
    rows_per_expert = case.world_size * case.max_tokens
    assert (indices.shape, indices.dtype) == ((last - first, rows_per_expert), torch.int32)
    assert (packed.shape, packed.dtype) == ((last - first, case.world_size), torch.int64)
    for expert in range(first, last):
        tokens: list[int] = []
        for source, each in enumerate(ids):
            named = (each == expert).any(1).nonzero().flatten().tolist()
            assert divmod(int(packed[expert - first, source]), 1 << 32) == (len(tokens), len(named))
            tokens += named
        assert indices[expert - first].tolist() == tokens + [-1] * (rows_per_expert - len(tokens))


def run_step(
    case: Case, layer: EPLowLatencyAllToAllLayer, number: int, context: RankContext, **options: bool
) -> torch.Tensor:
    step = LayerStep.of(case, layer, number, context, **options)
    step.check_dispatched()
    out = step.result()
    step.check_result(out)
    return out


def in_turn(context: RankContext, case: Case) -> None:
    """Steps one after another: the two sets of buffers take turns; results stay when later steps have run."""
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena)
        outs = [run_step(case, layer, number, context) for number in range(case.num_steps)]
        held = outs[0].cpu()
        run_step(case, layer, 0, context, with_dispatch=True)
        if case.quant_type != "none":
            run_step(case, layer, 0, context, cast_before=True)
        same_sums(outs[0], held, "the first step's result, later")
        layer.finalize()
        layer.finalize()
        raised(errors.ClosedError, lambda: LayerStep.of(case, layer, 0, context))


def zero_copy(context: RankContext, case: Case) -> None:
    """Rows that lie in the communication buffer only are combined; before anything can be there, an error."""
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena)
        for number in range(4):
            step = LayerStep.of(case, layer, number, context)
            given = torch.full_like(step.experts(), torch.nan), step.ids, step.weights, step.got[3]
            if number < layer.combine_ctx.num_phases:
                raised(errors.InputError, lambda given=given: layer.combine(*given, zero_copy=True), "nobody has asked")
            layer.combine_ctx.send_tokens_comm_buf.copy_(step.experts())
            step.check_result(layer.combine(*given, zero_copy=True))
        layer.finalize()


def two_open_steps(context: RankContext, case: Case) -> None:
    """Both sets of buffers between dispatch and combine at once, combined in the other order; a third is refused."""
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena)
        signal_values = []
        for number in range(2):  # of pairs
            first = LayerStep.of(case, layer, 2 * number, context)
            signal_values += [layer.dispatch_ctx.signal_val, layer.combine_ctx.signal_val]
            second = LayerStep.of(case, layer, 2 * number + 1, context)
            raised(errors.AlternationError, lambda number=number: LayerStep.of(case, layer, number, context))
            first.check_dispatched()
            second.check_dispatched()
            second.check_result(second.result())
            raised(errors.AlternationError, second.result, "dispatch_meta")
            first.check_result(first.result())
        assert signal_values == [1, 1, 2, 2]
        assert (layer.dispatch_ctx.phase, layer.dispatch_ctx.call_count) == (0, 4)
        layer.dispatch_ctx.update_phase()
        run_step(case, layer, 0, context)
        layer.finalize()


def refusals(context: RankContext, case: Case) -> None:
    """What the host refuses leaves the layer usable; what the device finds is raised, and over after reset."""
    with Arena(context.group, context.device) as arena:
        layer, other = make_layer(context, case, arena), make_layer(context, case, arena)
        step = LayerStep.of(case, layer, 0, context)
        rows, meta = step.experts(), step.got[3]
        raised(errors.InputError, lambda: layer.combine(rows, step.ids, None, meta), "topk_weights")
        raised(errors.ShapeError, lambda: layer.combine(rows, step.ids, step.weights[1:], meta))
        raised(errors.DtypeError, lambda: layer.combine(rows, step.ids, step.ids, meta))
        raised(errors.DtypeError, lambda: layer.combine(rows.double(), step.ids, step.weights, meta))
        raised(errors.ForeignIndicesError, lambda: layer.combine(rows, step.ids[1:], step.weights, meta))
        raised(errors.StateError, lambda: other.combine(rows, step.ids, step.weights, meta), "another layer")
        out = layer.combine(rows, None, step.weights.double(), meta)
        step.check_result(out)
        raised(errors.StateError, lambda: meta.recv_token_source_indices, "before combine")
        step = LayerStep.of(case, layer, 0, context, with_dispatch=True)
        raised(errors.InputError, lambda: layer.combine(step.experts(), step.ids, step.weights, step.got[3]))
        step.check_result(step.result())

        # rank 0 gives weights to dispatch, the others will to combine
        LayerStep.of(case, layer, 0, context, with_dispatch=context.rank == 0)
        synchronize(context)
        arena.rendezvous.barrier("failure seen")
        op = layer.dispatch_ctx.phases[0].op
        raised(errors.ConfigMismatchError, op.check)
        layer.reset()
        run_step(case, layer, 0, context)


def set_timeouts(layer: EPLowLatencyAllToAllLayer, timeout_secs: float) -> None:
    for buffers in layer.dispatch_ctx.phases:
        buffers.op.set_timeout(timeout_secs)


def mend(case: Case, layer: EPLowLatencyAllToAllLayer, num_steps: int, context: RankContext) -> None:
    """Reset a layer that has failed, and run steps of it."""
    set_timeouts(layer, ENOUGH_SECS)
    layer.reset()
    for number in range(num_steps):
        run_step(case, layer, number, context)


def a_rank_without_combine(context: RankContext, case: Case) -> None:
    """The last rank never combines: those that wait for its weights give up and name it; reset mends the layer."""
    absent = case.world_size - 1
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena)
        step = LayerStep.of(case, layer, 0, context)
        set_timeouts(layer, SHORT_TIMEOUT_SECS)

        def combine() -> None:
            # where the host exchanges blocks between nodes, it raises at once
            step.result()
            synchronize(context)
            step.got[3].buffers.op.check()

        error = raised(errors.RankTimeoutError, combine) if context.rank != absent else None
        arena.rendezvous.barrier("all have given up")
        if error is None:
            # told by the others of its node, its own launch leaves at once
            error = raised(errors.RankTimeoutError, combine)
        if context.rank != absent or case.num_nodes == 1:
            assert f"rank {absent}" in str(error)
            assert (error.missing_ranks, error.late_ranks) == ((), (absent,))
        mend(case, layer, 2, context)


def construction(context: RankContext, case: Case) -> None:
    """Arguments that cannot be, on all ranks or on one: every rank raises at once, and later layers are built."""
    last = context.rank == case.world_size - 1
    with Arena(context.group, context.device) as arena:

        def refused(kind: type[Exception], *words: str, **changes: Any) -> None:
            raised(kind, lambda: make_layer(context, case, arena, **changes), *words)

        refused(errors.UnsupportedError, "local_world_size", local_world_size=case.world_size + 1)
        refused(errors.UnsupportedError, "local_world_size", local_world_size=0)
        refused(errors.ConfigMismatchError, "on all ranks", local_world_size=case.world_size if last else 1)
        refused(errors.ConfigError, "fp8_gsize", online_quant_fp8=True, fp8_gsize=case.hidden_dim - 1)
        refused(errors.ConfigError, "online_quant_fp8", online_quant_fp8=True, dtype=FP8_DTYPE)
        refused(errors.ConfigError, rank=case.world_size - 1 - context.rank)
        with on_hosts("a" * (case.world_size - 1) + "b"):
            refused(
                errors.ConfigError, "local_world_size to keep each node on one host", local_world_size=case.world_size
            )
        mismatch = errors.UnsupportedError if last else errors.ConfigMismatchError
        refused(mismatch, "local_world_size", local_world_size=case.world_size + last)
        refused(errors.ConfigMismatchError, "max_num_inp_token_per_rank", max_m=case.max_tokens + last)
        contexts = create_ep_ll_a2a_ctx(
            case.max_tokens,
            case.hidden_dim,
            case.topk,
            case.num_experts,
            False,
            case.hidden_dim,
            case.dtype,
            case.world_size,
            context.rank,
            arena=arena,
        )
        assert [each.dtype for each in contexts] == [case.dtype, case.dtype]
        for each in contexts:
            each.finalize()
        assert contexts[0].phases[0].op.arena is arena
        raised(errors.ClosedError, contexts[0].phases[1].op.check)
        run_step(case, make_layer(context, case, arena), 0, context)
    shmem.shmem_torch_process_group_init(context.group.group_name, context.device)
    run_step(case, make_layer(context, case, None), 0, context)
    shmem.shmem_finalize()


def a_call_that_one_rank_refuses(context: RankContext, case: Case) -> None:
    """That rank's next call would use another set of buffers than the others' next call; reset brings them together."""
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena)
        run_step(case, layer, 0, context)
        set_timeouts(layer, SHORT_TIMEOUT_SECS)
        op = layer.dispatch_ctx.buffers.op
        if context.rank == 0:
            tokens = torch.ones(1, case.hidden_dim, dtype=torch.float64, device=context.device)
            ids = torch.zeros(1, case.topk, dtype=torch.int32, device=context.device)
            raised(errors.DtypeError, lambda: layer.dispatch(tokens, None, ids))
        else:
            LayerStep.of(case, layer, 1, context)
        synchronize(context)
        arena.rendezvous.barrier("the others have given up")
        if context.rank != 0:
            raised(errors.RankTimeoutError, op.check, "rank 0")
        mend(case, layer, 3, context)


def groups_of_another_size(context: RankContext, case: Case) -> None:
    """Online quantisation in groups of 64 and int64 ids: the bits of tokens that are cast before, and int32 ids."""
    case = replace(case, hidden_dim=192)
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena, online_quant_fp8=True, fp8_gsize=64)
        cast = make_layer(context, case, arena, dtype=FP8_DTYPE, fp8_gsize=64)
        mine = make_inputs(case, 0, context.rank)
        tokens, ids, weights = (each.to(context.device) for each in (mine.tokens, mine.ids, mine.weights))
        rows, scales = quantize_groups(tokens.unflatten(1, (3, 64)))
        far = ids.long()
        far[:, 0] += 1 << 32
        dropped = ids.clone()
        dropped[:, 0] = -1
        got = layer.dispatch(tokens, None, far)
        expected = cast.dispatch(rows.flatten(1), scales, dropped)
        same_bits(got[2], expected[2].cpu(), "counts")
        for expert, count in enumerate(expected[2].tolist()):
            for one, other in zip(got[:2], expected[:2]):
                same_bits(one[expert, :count], other[expert, :count].cpu(), f"expert {expert}")
        results = torch.ones_like(got[0], dtype=case.dtype)
        sums = layer.combine(results, far, weights, got[3])
        same_bits(sums, cast.combine(results, dropped, weights, expected[3]).cpu(), "sums")
        raised(errors.DtypeError, lambda: layer.dispatch(tokens.double(), None, ids), "send_tokens")


BODIES = {
    body.__name__: body
    for body in (
        zero_copy,
        two_open_steps,
        refusals,
        a_rank_without_combine,
        a_call_that_one_rank_refuses,
        construction,
        groups_of_another_size,
    )
}
