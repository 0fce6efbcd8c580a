"""Every door with a rank that brings nothing, receives nothing, or both; in every form that the door's docs allow.

Rank 1 idles. Experts return what they get, weighed: each door's layer returns a token times the sum of its weights.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from ep_a2a.compat.aiter.managers import make_manager
from ep_a2a.compat.deep_ep import Buffer
from ep_a2a.compat.triton_distributed import EPLowLatencyAllToAllLayer
from ep_a2a.integrations.atom import activate
from ep_a2a.integrations.manager import EngineManager
from ep_a2a.integrations.token_format import LayerShape, TokenFormat
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory.arena import Arena
from ep_a2a.quantization import dequantize, quantize_per_1x128
from ep_a2a.testing import RankContext
from tests.cases import atom_cases
from tests.cases.manager_cases import kwargs_of
from tests.cases.mori_programs import make_config, mori_world
from tests.cases.op_cases import Case

HIDDEN_DIM, TOPK, EXPERTS_PER_RANK, MAX_TOKENS = 128, 2, 3, 4
NUM_EXPERTS = 2 * EXPERTS_PER_RANK
SITUATIONS = (
    # tokens of both ranks, and experts that they may name
    ((3, 0), NUM_EXPERTS),  # rank 1 brings nothing
    ((2, 3), EXPERTS_PER_RANK),  # it receives nothing
    ((4, 0), EXPERTS_PER_RANK),  # both
    ((0, 0), NUM_EXPERTS),  # nobody brings anything
    ((3, 1), NUM_EXPERTS),  # and a step that is like others
)


class Tokens(NamedTuple):
    """What a rank brings: [T, H] bf16, [T, K] float32, [T, K] int32."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def steps_of(rank: int) -> list[Tokens]:
    generator, steps = torch.Generator().manual_seed(rank), []
    for counts, num_experts in SITUATIONS:
        x = torch.randint(-8, 9, (counts[rank], HIDDEN_DIM), generator=generator).bfloat16()
        weights = torch.randint(1, 5, (counts[rank], TOPK), generator=generator) / 4
        ids = torch.rand(counts[rank], num_experts, generator=generator).argsort(1)[:, :TOPK].int().contiguous()
        steps.append(Tokens(x, weights, ids))
    return steps


def weighed(context: RankContext, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What this rank's experts return for rows [R, H] with global ids."""
    is_local = ids.div(EXPERTS_PER_RANK, rounding_mode="floor") == context.rank
    return (rows.float() * (weights * is_local).sum(1, keepdim=True)).bfloat16()


def op_step(
    context: RankContext, op: Any, mine: Tokens, rows: str, weights: str, split: bool, empty_scales: bool
) -> torch.Tensor:
    """A step of MORI's op. rows: "all", "cut" to what came, or "registered"; weights: of combine, cut as rows are."""
    scales = torch.empty(0) if empty_scales else None
    if split:
        got = op.dispatch_send(mine.x, mine.weights, scales, mine.ids)
        op.dispatch_recv()
    else:
        got = op.dispatch(mine.x, mine.weights, scales, mine.ids)
    last = int(got.total_recv) if rows == "cut" else None
    back = weighed(context, got.tokens, got.weights, got.indices)[:last]
    if rows == "registered":
        op.get_registered_combine_input_buffer(torch.bfloat16).copy_(back)
    given = {"none": None, "own": mine.weights, "received": got.weights[:last]}.get(weights, got.weights[:last].clone())
    sums = op.combine_send(back, given, mine.ids) if split else op.combine(back, given, mine.ids)
    if split:
        op.combine_recv()
    op.native.check()
    if weights in ("received", "copied"):
        num_ranks = torch.stack([(mine.ids < EXPERTS_PER_RANK).any(1), (mine.ids >= EXPERTS_PER_RANK).any(1)]).sum(0)
        assert torch.equal(sums[1][: len(mine.x)], mine.weights * num_ranks[:, None])
    return sums[0][: len(mine.x)]


def mori(context: RankContext, steps: list[Tokens], rows: str, weights: str, **options: Any) -> Any:
    changes = {"hidden_dim": HIDDEN_DIM, "max_num_inp_token_per_rank": MAX_TOKENS, **options.pop("config", {})}
    with mori_world(context) as module:
        wanted = make_config(module, context, use_external_inp_buf=rows != "registered", **changes)
        op = module.ops.EpDispatchCombineOp(wanted)
        for mine in steps:
            yield mine, op_step(context, op, mine, rows, weights, **{"split": False, "empty_scales": False, **options})


def handle_kwargs(context: RankContext, **changes: Any) -> dict[str, Any]:
    return kwargs_of(Case(2, HIDDEN_DIM, TOPK, NUM_EXPERTS, MAX_TOKENS), context.rank, **changes)


def aiter_handle(context: RankContext, steps: list[Tokens], backend: str, weights: str) -> Any:
    manager = make_manager(backend, context.group)
    manager.device = context.device
    op = manager.get_handle(handle_kwargs(context))
    for mine in steps:
        yield mine, op_step(context, op, mine, "cut", weights, split=False, empty_scales=False)
    manager.destroy()


def manager(context: RankContext, steps: list[Tokens], backend: str, **changes: Any) -> Any:
    """Dispatch and combine of a manager itself."""
    made = create_manager(backend, context.group)
    made.device = context.device
    op = made.get_handle(handle_kwargs(context, **changes))
    for mine in steps:
        got = made.dispatch(mine.x, mine.weights, mine.ids)
        yield mine, made.combine(weighed(context, *got))
    del op
    made.destroy()


def engine(context: RankContext, steps: list[Tokens], cast: str, split: bool) -> Any:
    """The dispatcher that the engines' adapters call."""
    made = EngineManager(context.group)
    made.device = context.device
    shape = LayerShape(torch.bfloat16, HIDDEN_DIM, TOPK, NUM_EXPERTS, EXPERTS_PER_RANK, MAX_TOKENS)
    (dispatcher,) = made.dispatchers(object(), TokenFormat(cast), shape)
    for mine in steps:
        tokens, weights, scales, ids, _ = dispatcher.dispatch(*dispatcher.fitted(*mine), step_tokens=MAX_TOKENS)
        rows = tokens if cast == "none" else dequantize(tokens, scales, cast)
        back = weighed(context, rows, weights, ids)
        yield mine, dispatcher.combine_send(back)() if split else dispatcher.combine(back)
    made.check()
    made.destroy()


def atom(context: RankContext, steps: list[Tokens], **changes: Any) -> Any:
    """ATOM's modular kernel of a layer, whose rows are narrower than those here; rows are cut to what came."""
    with atom_cases.shape(context, "ep_a2a"):
        assert activate()
        kernel = atom_cases.make_kernel(context, **changes)
        for each in steps:
            mine = each._replace(x=each.x[:, : atom_cases.HIDDEN_DIM].contiguous())
            rows, _, metadata, ids, weights = kernel._prepare(*mine, NUM_EXPERTS, None, False, None)[1]()
            back = weighed(context, rows, weights, ids)[: int(metadata.expert_num_tokens)]
            yield mine, kernel._finalize(None, back, mine.weights, mine.ids, False)[1]()


def deep_ep(
    context: RankContext, steps: list[Tokens], *, topk: bool, fp8: bool = False, again: bool = False, worst: int = 0
) -> Any:
    """Normal mode. topk: with topk_idx; again: the dispatch is repeated by its handle, and combined twice."""
    buffer = Buffer(context.group, 0, 0, device=context.device, explicitly_destroy=True)
    for mine in steps:
        ids = mine.ids.long()
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, NUM_EXPERTS)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": is_in_rank, "num_tokens_per_expert": per_expert}
        routed = {"topk_idx": ids, "topk_weights": mine.weights} if topk else {}
        x: Any = quantize_per_1x128(mine.x) if fp8 else mine.x
        got, local, weights, _, handle, _ = buffer.dispatch(x, **layout, **routed, num_worst_tokens=worst)
        if again:
            got = buffer.dispatch(x, handle=handle)[0]
        rows = dequantize(*got, "fp8_per_1x128") if fp8 else got
        if topk:
            back = (rows.float() * weights.masked_fill(local < 0, 0).sum(1, keepdim=True)).bfloat16()
            for _ in range(1 + again):
                sums, sent_back, _ = buffer.combine(back, handle, topk_weights=weights)
                assert torch.equal(sent_back, mine.weights)
            yield mine, sums
        else:
            num_ranks = is_in_rank.sum(1, keepdim=True)
            sums = buffer.combine(rows.bfloat16(), handle)[0]
            yield mine, sums.float() / num_ranks * mine.weights.sum(1, keepdim=True)
    buffer.destroy()


def deep_ep_low_latency(
    context: RankContext, steps: list[Tokens], *, fp8: bool, weights_first: bool, in_halves: bool, twice: bool = False
) -> Any:
    buffer = Buffer(context.group, 0, 0, low_latency_mode=True, device=context.device, explicitly_destroy=True)
    halves = {"return_recv_hook": in_halves}
    for mine in steps:
        sent = {"topk_weights": mine.weights} if weights_first else {}
        got, _, handle, _, hook = buffer.low_latency_dispatch(
            mine.x, mine.ids.long(), MAX_TOKENS, NUM_EXPERTS, use_fp8=fp8, **halves, **sent
        )
        if in_halves:
            hook()
        rows = got
        if fp8:
            rows = dequantize(got[0].flatten(0, 1), got[1].flatten(0, 1), "fp8_per_1x128").bfloat16().view(got[0].shape)
        rows = rows.clone()
        for _ in range(1 + twice):
            given = None if weights_first else mine.weights
            sums, _, hook = buffer.low_latency_combine(rows, mine.ids.long(), given, handle, **halves)
            if in_halves:
                hook()
        yield mine, sums
    buffer.destroy()


def triton_distributed(
    context: RankContext, steps: list[Tokens], *, group_size: int, weights_first: bool, cast_before: bool = False
) -> Any:
    """group_size: elements of an fp8 scale, 0 without a cast; 128 is cast by dispatch, 64 by torch."""
    layer = EPLowLatencyAllToAllLayer(
        MAX_TOKENS,
        HIDDEN_DIM,
        TOPK,
        bool(group_size),
        context.rank,
        NUM_EXPERTS,
        2,
        2,
        fp8_gsize=group_size or 128,
        arena=Arena(context.group, context.device),
    )
    for mine in steps:
        sent = {"topk_weights": mine.weights} if weights_first else {}
        x, scales = quantize_per_1x128(mine.x) if cast_before else (mine.x, None)
        rows, scales, _, meta = layer.dispatch(x, scales, mine.ids, **sent)
        if scales is not None:
            rows = (rows.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2).bfloat16()
        yield mine, layer.combine(rows.clone(), mine.ids, None if weights_first else mine.weights, meta)
    layer.finalize()


def _forms() -> dict[str, partial[Any]]:
    found: dict[str, partial[Any]] = {}
    for rows in ("all", "cut", "registered"):
        for weights in ("none", "own", "received", "copied"):
            found[f"mori rows {rows} weights {weights}"] = partial(mori, rows=rows, weights=weights)
    two_nodes = {"gpu_per_node": 1}
    return found | {
        "mori halves": partial(mori, rows="cut", weights="copied", split=True),
        "mori empty scales": partial(mori, rows="all", weights="none", empty_scales=True),
        "mori two nodes": partial(mori, rows="cut", weights="copied", config=two_nodes),
        "aiter": partial(aiter_handle, backend="ep_a2a", weights="copied"),
        "aiter own weights": partial(aiter_handle, backend="ep_a2a", weights="own"),
        "aiter on collectives": partial(aiter_handle, backend="allgather_reducescatter", weights="copied"),
        "manager ep_a2a": partial(manager, backend="ep_a2a"),
        "manager rank_major": partial(manager, backend="ep_a2a", layout="rank_major"),
        "manager naive": partial(manager, backend="naive"),
        "manager allgather": partial(manager, backend="allgather_reducescatter"),
        "engine": partial(engine, cast="none", split=False),
        "engine cast": partial(engine, cast="fp8_per_1x128", split=False),
        "engine halves": partial(engine, cast="fp8_per_token", split=True),
        "atom": partial(atom),
        "atom low latency": partial(atom, enable_low_latency=True),
        "deep_ep": partial(deep_ep, topk=True),
        "deep_ep without topk": partial(deep_ep, topk=False),
        "deep_ep fp8 again": partial(deep_ep, topk=True, fp8=True, again=True),
        "deep_ep worst case": partial(deep_ep, topk=True, worst=2 * MAX_TOKENS),
        "deep_ep low latency": partial(deep_ep_low_latency, fp8=False, weights_first=False, in_halves=False),
        "deep_ep low latency twice": partial(
            deep_ep_low_latency, fp8=True, weights_first=False, in_halves=True, twice=True
        ),
        "deep_ep low latency weights first": partial(
            deep_ep_low_latency, fp8=True, weights_first=True, in_halves=False
        ),
        "triton_dist": partial(triton_distributed, group_size=0, weights_first=False),
        "triton_dist fp8": partial(triton_distributed, group_size=128, weights_first=True),
        "triton_dist torch casts": partial(triton_distributed, group_size=64, weights_first=False),
        "triton_dist cast before": partial(triton_distributed, group_size=128, weights_first=False, cast_before=True),
    }


FORMS = _forms()


def idle(context: RankContext, form: str) -> None:
    """Steps in all situations, one after the other."""
    for number, (mine, got) in enumerate(FORMS[form](context, steps_of(context.rank))):
        expected = mine.x.float() * mine.weights.sum(1, keepdim=True)
        torch.testing.assert_close(got.float(), expected, rtol=7e-2, atol=7e-2, msg=f"sums of step {number}")
