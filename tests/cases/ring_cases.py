"""Cases and bodies of the kernels that send chunks between nodes, for virtual nodes on CPU and on GPUs."""

import logging
from dataclasses import replace
from typing import Any

import torch

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.ring_shape import Rings
from ep_a2a.log_once import log_once
from ep_a2a.ops import ring_launches
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, arena_of, check_dispatched, make_inputs, make_op, reference_of
from tests.cases.op_checks import synchronize
from tests.cases.op_matrix import UNEVEN, listed
from tests.cases.tables import read_table
from tests.messages import messages_of


def rings(chunk_tokens: int, ring_chunks: int, num_channels: int) -> dict[str, Any]:
    """Options of rings of this shape."""
    return {
        "chunk_tokens": chunk_tokens,
        "ring_chunks": ring_chunks,
        "rdma_block_num": num_channels,
        "launch": "manual",
    }


SMALL_RINGS = rings(3, 2, 2)
OF_FOUR_RANKS = read_table("op_matrix")["of_four_ranks"]
FEW = Case(layout="rank_major", tokens=UNEVEN, num_steps=3, topk=3, num_experts=9, routing="out_of_range", num_nodes=2)
GRIDS = {
    f"{num_nodes}x{per_node}-{layout}": Case(
        world_size=num_nodes * per_node,
        num_nodes=num_nodes,
        num_experts=2 * num_nodes * per_node + 1,
        topk=3,
        hidden_dim=40,
        tokens=UNEVEN,
        step_tokens=("own", None),
        num_steps=2,
        layout=layout,
        routing="out_of_range",
        options=SMALL_RINGS,
    )
    for num_nodes, per_node, layout in (
        (2, 3, "rank_major"),
        (3, 2, "compact"),
        (4, 1, "rank_major"),
        (2, 4, "compact"),
        (2, 1, "expert_major"),
    )
}
SHAPES = listed("rings") | GRIDS
SHAPES_AND_FLAT = SHAPES | {"flat": replace(FEW, kernel="InterNode", split="mixed")}
"""The flat form sends to any rank's memory, which puts do not reach."""
SPECIAL = ("late-rank", "order-interleaved", "sequential-ops-share-memory", "weights-on-some-ranks")


def on_two_nodes(case: Case) -> Case:
    """A case of the op inside a node, on two nodes, with rings that hold little."""
    return replace(case, num_nodes=2, num_steps=min(case.num_steps, 4), options=case.options | SMALL_RINGS)


def of_two_ranks(case: Case) -> Case:
    """A special case with few tokens, on two nodes of one rank."""
    return replace(case, world_size=2, num_nodes=2, tokens=((5, 3), (2, 9)), num_experts=5, options=SMALL_RINGS)


ONE_MISSING = Case(
    world_size=4,
    num_nodes=2,
    num_experts=8,
    layout="rank_major",
    with_weights=False,
    combine_weights=False,
    options=SMALL_RINGS,
)
RING_KERNELS = ("InterNodeV1", "InterNodeV1LL", "AsyncLL")
REPLAYED = Case(world_size=2, num_nodes=2, tokens=((5, 2),), num_experts=9, layout="rank_major", options=SMALL_RINGS)

CAST_BEFORE = Case(
    world_size=4,
    num_nodes=2,
    tokens=((8, 5, 0, 0), (0, 0, 3, 8)),
    num_experts=8,
    quant_type="fp8_per_1x128",
    hidden_dim=256,
    num_steps=2,
    options=SMALL_RINGS,
)
"""For cast_before: the ranks of one node bring nothing, and pass on what the other node sends."""


def other_numbers_of_programs(context: RankContext, case: Case) -> None:
    """Ranks ask for different launch numbers; more channels than programs must not make them wait for each other."""
    with arena_of(context, case) as memory:
        op = make_op(context, case, memory)
        # fixed by what ranks agree on, whatever a call asks for
        _, num_channel_programs, _ = op.get_launch_config()
        assert 0 < num_channel_programs <= case.options["rdma_block_num"]
        # programs that exchange nothing are as many as the call, else the config says
        for is_dispatch in (True, False):
            assert op.get_launch_config(is_dispatch) == (2, num_channel_programs, 8)
            assert op.get_launch_config(is_dispatch, 1 + context.rank, 2) == (1 + context.rank, num_channel_programs, 8)
        everyone = [make_inputs(case, 0, rank) for rank in range(case.world_size)]
        mine = everyone[context.rank]
        tokens, weights, ids = (t.to(context.device) for t in (mine.tokens, mine.weights, mine.ids) if t is not None)
        with messages_of(ring_launches.logger, logging.WARNING) as texts:
            log_once.cache_clear()
            got = op.dispatch(tokens, weights, None, ids, 2 + context.rank, warp_per_block=4)
        assert ["warp_per_block=4" in text for text in texts] == [True]
        check_dispatched(case, op, got, reference_of(case, 0, everyone)[context.rank])
        op.combine(got[0], None, ids, 3 - context.rank)
        synchronize(context)
        op.check()


def lines_that_cross(context: RankContext, case: Case) -> tuple[int, int, int]:
    """What crosses between nodes in a step.

    Returns:
        (rows that other nodes sent to this rank, other nodes that its own tokens go to, other nodes' ranks likewise).
    """
    per_node = case.world_size // case.num_nodes
    with arena_of(context, case) as memory:
        op = make_op(context, case, memory)
        step = Step.dispatch(case, op, 0, context.device)
        synchronize(context)
        crossed = rows_from_other_nodes(op, max(step.counts))
        step.combine()
    ids = make_inputs(case, 0, context.rank).ids
    # as many experts on every rank
    ranks = torch.where(ids >= 0, ids // (case.num_experts // case.world_size), -1)
    away = [
        {int(rank) for rank in token if rank >= 0 and rank // per_node != context.rank // per_node} for token in ranks
    ]
    return crossed, sum(len({rank // per_node for rank in each}) for each in away), sum(map(len, away))


def rows_from_other_nodes(op: EpDispatchCombineOp, num_tokens: int) -> int:
    """Tokens that came to this rank from other nodes in the last step, through its rings, to be forwarded.

    Args:
        op: one whose kernels use rings, with its last kernel awaited.
        num_tokens: the most that any rank brought. No rank may have brought more of its own in an earlier step.
    """
    rings = Rings.of(op.config)
    num_chunks = -(-num_tokens // rings.chunk_tokens)
    rows = op.memory.view(Region.FORWARDED_ROWS).view(rings.num_nodes, -1, rings.chunk_tokens, rings.gpus_per_node)
    lines = op.memory.view(Region.FORWARDED_LINES)[:, :num_chunks]
    is_line = torch.arange(rings.chunk_tokens, device=lines.device) < lines[:, :, None]
    came = (rows[:, :num_chunks] >= 0).any(3) & is_line
    came[op.config.rank // rings.gpus_per_node] = False
    return int(came.sum())
