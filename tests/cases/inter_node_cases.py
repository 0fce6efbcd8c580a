"""Bodies of inter-node tests: the cases of the op tests on virtual nodes, against the same oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_transport import TorchDistributedRail
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import make_subgroup
from ep_a2a.ops.staged import InterNodeDispatchCombineOp
from ep_a2a.reference import DispatchReference, combine_weights_reference
from tests.cases.op_cases import (
    Case,
    assert_same_memory,
    combine_by_nodes,
    expert_rows,
    make_biases,
    make_inputs,
    of_node,
    reference_of,
    same_bits,
    same_sums,
    wire_rows,
)
from tests.cases.rail_cases import grid_of

if TYPE_CHECKING:
    from ep_a2a.memory.node_grid import NodeGrid
    from ep_a2a.testing import RankContext

POISON_BYTE = 0xC3


@dataclass(frozen=True)
class Nodes:
    """N virtual nodes of G ranks, seen from one rank, with what an op across them stands on."""

    grid: NodeGrid
    rail: TorchDistributedRail
    arena: Arena
    rendezvous: Rendezvous

    @classmethod
    def of(cls, context: RankContext, num_nodes: int) -> Nodes:
        """Cuts the context's group, whose size num_nodes divides."""
        grid = grid_of(num_nodes, context.world_size // num_nodes, context.rank)
        rail = TorchDistributedRail(context.group, grid, 60.0)
        return cls(
            grid, rail, Arena(make_subgroup(context.group, grid.node_ranks), context.device), Rendezvous(context.group)
        )

    def op(self, case: Case, rank: int) -> InterNodeDispatchCombineOp:
        """The op of a case."""
        config = case.config(
            rank, kernel_type=EpDispatchCombineKernelType.InterNodeV1, gpu_per_node=self.grid.gpus_per_node
        )
        return InterNodeDispatchCombineOp(config, self.grid, self.rail, self.arena, self.rendezvous)

    def in_order(self, received: DispatchReference, rows: torch.Tensor) -> torch.Tensor:
        """Rows that ascend by source rank, in the op's order: by the local rank through which they come."""
        parts = torch.split(rows, received.counts_per_source.tolist())
        return torch.cat([parts[rank] for rank in self.by_rail()])

    def by_rail(self) -> list[int]:
        """All ranks, those of one local rank together."""
        local_ranks, nodes = range(self.grid.gpus_per_node), range(self.grid.num_nodes)
        return [node * self.grid.gpus_per_node + local for local in local_ranks for node in nodes]

    def counts(self, received: DispatchReference) -> list[int]:
        """Rows that come through each local rank."""
        by_source = received.counts_per_source.view(self.grid.num_nodes, self.grid.gpus_per_node)
        return [int(count) for count in by_source.sum(0)]

    def valid(self, received: DispatchReference, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of one of the op's tensors that hold rows, in order; views."""
        counts = self.counts(received)
        return [tensor[: sum(counts)]] if tensor.dim() == 2 else [tensor[g, :n] for g, n in enumerate(counts)]


def run_inter_node(context: RankContext, case: Case, num_nodes: int) -> None:
    """Every step of the case on one op across num_nodes nodes, against the oracle."""
    nodes = Nodes.of(context, num_nodes)
    with nodes.arena:
        op = nodes.op(case, context.rank)
        for number in range(case.num_steps):
            run_inter_node_step(case, nodes, op, number, context.device)
        op.check()
        op.close()
    nodes.rail.close()


def run_inter_node_step(
    case: Case, nodes: Nodes, op: InterNodeDispatchCombineOp, number: int, device: torch.device
) -> None:
    """One step, checked after its dispatch and after its combine."""
    rank, dtype = op.config.rank, op.config.combined_dtype
    everyone = [make_inputs(case, number, r) for r in range(case.world_size)]
    reference = reference_of(case, number, everyone)
    mine = everyone[rank]
    inputs = [None if t is None else t.to(device) for t in (mine.tokens, mine.weights, mine.scales, mine.ids)]
    wishes = {"max_num_tokens": case.stride(number), "pad_id": case.pad_id}
    if case.in_halves(number, rank, "dispatch"):
        promised = op.dispatch_send(*inputs, **wishes)
        got = op.dispatch_recv()
        assert_same_memory(promised, got)
    else:
        got = op.dispatch(*inputs, **wishes)
    check_rows(case, nodes, op, got, reference[rank])

    all_rows = [expert_rows(case, dtype, each, r, number) for r, each in enumerate(reference)]
    rows = torch.empty(*got[0].shape[:-1], case.hidden_dim, dtype=dtype, device=device)
    rows.view(torch.uint8).fill_(POISON_BYTE)
    own = nodes.in_order(reference[rank], all_rows[rank]).to(device)
    start = 0
    for part in nodes.valid(reference[rank], rows):
        part.copy_(own[start : start + len(part)])
        start += len(part)
    weights = got[1] if case.combine_weights else None
    counts = [each.tokens.shape[0] for each in everyone]
    biases = [make_biases(case, dtype, count, r, number) for r, count in enumerate(counts)]
    given = {name: bias.to(device) for name, bias in biases[rank].items()}
    if case.in_halves(number, rank, "combine"):
        promised = op.combine_send(rows, weights, inputs[3], **given)
        result, sums = op.combine_recv()
        assert_same_memory(promised, (result, sums))
    else:
        result, sums = op.combine(rows, weights, inputs[3], **given)
    sent = [wire_rows(each, case.quant_type) for each in all_rows]
    same_sums(
        result[: counts[rank]],
        combine_by_nodes(sent, reference, counts, dtype, nodes.grid.num_nodes, biases)[rank],
        "combine",
    )
    if weights is None:
        assert sums is None
        return
    weight_rows = [r.valid_rows(r.weights) for r in reference if r.weights is not None]
    partial = [
        combine_weights_reference(of_node(weight_rows, node, nodes.grid.num_nodes), reference, counts)[rank]
        for node in range(nodes.grid.num_nodes)
    ]
    assert sums is not None
    same_sums(sums[: counts[rank]], sum(partial[1:], partial[0]), "combined weights")


def check_rows(
    case: Case, nodes: Nodes, op: InterNodeDispatchCombineOp, got: tuple[Any, ...], expected: DispatchReference
) -> None:
    """Rows and all that came with them, bit for bit, in the op's order."""
    tokens, weights, scales, ids, total = got
    assert total.tolist() == [expected.total_recv]
    assert op.recv_counts.tolist() == nodes.counts(expected)
    for name, tensor, right in (
        ("tokens", tokens, expected.tokens), ("ids", ids, expected.ids), ("weights", weights, expected.weights),
        ("scales", scales, expected.scales),
    ):  # fmt: skip
        assert (tensor is None) == (right is None), name
        if tensor is not None and right is not None:
            found = torch.cat(nodes.valid(expected, tensor))
            same_bits(found, nodes.in_order(expected, expected.valid_rows(right)), name)
    positions = nodes.in_order(expected, expected.valid_rows(expected.source_positions))
    same_bits(op.get_dispatch_src_token_pos(), positions, "source positions")
    is_pad = torch.ones_like(ids, dtype=torch.bool)
    for part in nodes.valid(expected, is_pad):
        part.fill_(False)
    assert bool((ids[is_pad] == case.pad_id).all()), f"padding rows hold {ids[is_pad].unique()}"
