"""Bodies of the op tests: run on every rank, on CPU (tests/multiprocess) and on GPUs (tests/multigpu) alike.

Every rank generates the data of all ranks from seeds, so the oracle needs no communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ep_a2a.config import (
    DISPATCH_QUANT_TYPES,
    FP8_DTYPE,
    EpDispatchCombineConfig,
    EpDispatchCombineKernelType,
    num_owned_experts,
)
from ep_a2a.kernels.layout import ARRIVAL_SHIFT, STEP_SHIFT, Region
from ep_a2a.memory import nvshmem
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_memory import NodeArena
from ep_a2a.memory.node_transport import NodeAllToAll
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.policy import adds_arrived
from ep_a2a.quantization import dequantize, fp32_to_e4m3_bits, quantize
from ep_a2a.reference import (
    DispatchReference,
    combine_reference,
    combine_weights_reference,
    dispatch_reference,
    reduce_experts_reference,
)
from ep_a2a.routing import ROUTINGS
from ep_a2a.testing import RankContext
from tests.cases.tables import read_table

POISON_BYTE = 0xC3
NUM_EPOCHS = 2**32 - 1
EXCHANGE_TIMEOUT_SECS = 60.0
BY_PUTS, BY_HOSTS = ({"internode_transport": name} for name in ("nvshmem", "torch.distributed"))
"""Options of cases whose ranks reach other nodes by puts, or by exchanges of whole blocks that the hosts make.

On CPU copies of bytes stand for puts.
"""


@dataclass(frozen=True)
class Case:
    """One op and the steps to run on it; `tokens` gives T by rank for each step, repeated as needed.

    unusual: rows, weights, scales and results hold what the kernels use as marks: words with all bits set or that equal
        an epoch, NaN, infinities.
    num_nodes, kernel: virtual nodes that the ranks make up, and the name of the kernel type when there are several.
    split: which calls are made in halves: "" none, "all", or "mixed", which differs between ranks and steps.
    step_tokens: by step, the argument of dispatch; "own" for a list of bounds, some with room.
    num_biases: how many of combine's biases are given; ranks with an odd number give the second one first.
    """

    world_size: int = 4
    hidden_dim: int = 64
    topk: int = 2
    num_experts: int = 8
    max_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16
    layout: str = "compact"
    routing: str = "uniform"
    tokens: tuple[tuple[int, ...], ...] = ((16,),)
    num_steps: int = 2
    quant_type: str = "none"
    scale_format: str = "float32"
    scale_dim: int = 0
    scale_dtype: torch.dtype = torch.float32
    with_weights: bool = True
    zero_copy: bool = False
    combine_weights: bool = True
    pad_id: int = -1
    step_tokens: tuple[int | Sequence[int] | str | None, ...] = (None,)
    first_epoch: int = 0
    seed: int = 0
    unusual: bool = False
    split: str = ""
    num_biases: int = 0
    num_nodes: int = 1
    kernel: str = "InterNodeV1"
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, rank: int, /, **changes: Any) -> EpDispatchCombineConfig:
        values: dict[str, Any] = {
            "data_type": self.dtype,
            "rank": rank,
            "world_size": self.world_size,
            "hidden_dim": self.hidden_dim,
            "scale_dim": self.scale_dim,
            "scale_type_size": self.scale_dtype.itemsize if self.scale_dim else 0,
            "max_token_type_size": 4,
            "max_num_inp_token_per_rank": self.max_tokens,
            "num_experts_per_rank": num_owned_experts(self.num_experts, self.world_size, rank),
            "num_experts_per_token": self.topk,
            "num_experts": self.num_experts,
            "layout": self.layout,
            "quant_type": self.quant_type,
            "scale_format": self.scale_format,
            "timeout_secs": 60.0,
            # faults are tried in first steps, too
            "first_timeout_secs": 1.0,
        }
        if self.num_nodes > 1:
            values["kernel_type"] = EpDispatchCombineKernelType[self.kernel]
            values["gpu_per_node"] = self.world_size // self.num_nodes
        return EpDispatchCombineConfig(**{**values, **self.options, **changes})

    @property
    def cast(self) -> str:
        """The cast inside dispatch."""
        kind: str = self.options.get("dispatch_quant_type") or self.quant_type
        return kind if kind in DISPATCH_QUANT_TYPES else "none"

    def epoch(self, step: int) -> int:
        """The epoch of a step of an op that has done no other ones, as an int32."""
        epoch = (self.first_epoch + step) % NUM_EPOCHS + 1
        return epoch - 2**32 if epoch >= 2**31 else epoch

    def in_halves(self, step: int, rank: int, phase: str) -> bool:
        """Whether a rank splits this call."""
        return self.split == "all" or (self.split == "mixed" and (step + rank + (phase == "combine")) % 2 == 0)

    def num_tokens(self, step: int, rank: int) -> int:
        counts = self.tokens[step % len(self.tokens)]
        return counts[rank % len(counts)]

    def stride(self, step: int) -> int | Sequence[int] | None:
        """The step_tokens of a dispatch."""
        given = self.step_tokens[step % len(self.step_tokens)]
        if given is None or isinstance(given, int):
            return given
        if given != "own":
            return [int(given[rank % len(given)]) for rank in range(self.world_size)]
        counts = [self.num_tokens(step, rank) for rank in range(self.world_size)]
        room = [count + (rank + step) % 3 // 2 * (1 + rank) for rank, count in enumerate(counts)]
        return [min(each, self.max_tokens) for each in room]


@dataclass(frozen=True)
class Inputs:
    """One rank's inputs of a step, as given to dispatch."""

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor

    def on(self, device: torch.device) -> list[Any]:
        """The arguments of dispatch on a device."""
        return [
            None if each is None else each.to(device) for each in (self.tokens, self.weights, self.scales, self.ids)
        ]


def make_inputs(case: Case, step: int, rank: int) -> Inputs:
    generator = torch.Generator().manual_seed(1 + case.seed * 1_000_003 + step * 1009 + rank)
    num_tokens = case.num_tokens(step, rank)
    values = torch.randn(num_tokens, case.hidden_dim, generator=generator)
    tokens = quantize(values, "fp8_per_token")[0] if case.dtype == FP8_DTYPE else values.to(case.dtype)
    weights = torch.rand(num_tokens, case.topk, generator=generator) if case.with_weights else None
    scales = None
    if case.scale_dim:
        raw = torch.randint(0, 256, (num_tokens, case.scale_dim * case.scale_dtype.itemsize), generator=generator)
        scales = raw.to(torch.uint8).view(case.scale_dtype)
    if case.cast == "fp8_static":
        scales = torch.rand(1, generator=generator) + 0.001
    ids = ROUTINGS[case.routing](num_tokens, case.topk, case.num_experts, case.world_size, generator)
    if case.unusual:
        for tensor in (tokens, weights, scales):
            if tensor is not None and tensor.dim() == 2:
                make_unusual(tensor, case.epoch(step), step + rank)
    return Inputs(tokens, weights, scales, ids)


def make_unusual(rows: torch.Tensor, epoch: int, first: int) -> None:
    """Writes the kernels' marks into rows [T, ...], in place: another kind of row for each of any eight in turn."""
    size = 4 if rows.shape[1:].numel() * rows.element_size() % 4 == 0 else rows.element_size()
    words = rows.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    marks = [epoch, epoch - 1, epoch + 1, -(2**31), 2**31 - 1, 0, -1]
    low = [mark & (1 << (8 * size)) - 1 for mark in marks]
    halves = [mark - (1 << (8 * size)) if size > 1 and mark >= 1 << (8 * size - 1) else mark for mark in low]
    all_bits = halves[-1]
    for number, row in enumerate(words):
        kind = (number + first) % 8
        if kind == 0:
            row.fill_(all_bits)
        elif kind == 1:
            row[0] = all_bits
        elif kind == 2:
            row[-1] = all_bits
        elif kind == 3:
            row[::3] = all_bits
        elif kind == 4:
            for place, mark in enumerate(halves):
                row[place :: len(halves)] = mark
        elif kind == 5:
            row.fill_(halves[number % 3])
        elif kind == 6:
            row[1:] = all_bits


def make_results_unusual(rows: torch.Tensor, first: int) -> None:
    """Experts' rows [N, H] with NaN (all bits set, too), infinities, large, tiny and zero numbers, in place."""
    for number, row in enumerate(rows):
        kind = (number + first) % 8
        if kind == 0:
            row.view(torch.uint8).fill_(0xFF)
        elif kind == 1:
            row[1::5].view(torch.int16 if row.element_size() == 2 else torch.int32).fill_(-1)
        elif kind == 2:
            row[number % len(row)] = torch.nan
        elif kind == 3:
            row[0], row[-1] = torch.inf, -torch.inf
        elif kind == 4:
            row *= 9000.0
        elif kind == 5:
            row *= 1e-5
        elif kind == 6:
            row.copy_(torch.zeros_like(row).copysign(row))


def reference_of(case: Case, step: int, everyone: Sequence[Inputs]) -> list[DispatchReference]:
    tokens = [inputs.tokens for inputs in everyone]
    scales = [inputs.scales for inputs in everyone]
    if case.cast != "none":
        pairs = [
            quantize(x, case.cast, case.scale_format, s) if x.dtype != FP8_DTYPE else (x, s)
            for x, s in zip(tokens, scales)
        ]
        tokens = [pair[0] for pair in pairs]
        scales = [None if case.cast == "fp8_static" else pair[1] for pair in pairs]
    return dispatch_reference(
        tokens,
        [inputs.weights for inputs in everyone],
        scales,
        [inputs.ids for inputs in everyone],
        num_experts=case.num_experts,
        step_tokens=case.stride(step) or case.max_tokens,
        layout=case.layout,
        stride_tokens=case.max_tokens,
        pad_id=case.pad_id,
        local_ids=case.options.get("local_ids", False),
    )


def same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare tensors whose first dimension is rows."""
    # contiguous() leaves the strides of a single element as they are
    got = torch.empty(got.shape, dtype=got.dtype).copy_(got)
    expected = expected.contiguous()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (got, expected)]
        raise AssertionError(f"{what}: {kinds[0]} instead of {kinds[1]}")
    if got.numel() and not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        found, right = (each.view(len(each), -1).view(torch.uint8) for each in (got, expected))
        different = (found != right).any(1).nonzero().flatten()
        first = int(different[0])
        text = f"rows {different[:8].tolist()} of {got.shape[0]} differ"
        text += f"; first: {got[first]} instead of {expected[first]}"
        raise AssertionError(f"{what}: {text}")


def same_valid_rows(reference: DispatchReference, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare the received rows of two tensors in the reference's layout."""
    same_bits(reference.valid_rows(got), reference.valid_rows(expected), what)


def same_sums(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit for bit, but that which NaN comes out of a sum is not defined."""
    nan = expected.isnan()
    found = got.cpu().isnan()
    if found.shape == nan.shape and not torch.equal(found, nan):
        raise AssertionError(f"{what}: NaN in {(found != nan).nonzero()[:8].tolist()} and not there, or absent")
    same_bits(got.cpu().masked_fill(nan, 0), expected.masked_fill(nan, 0), what)


def wire_rows(rows: torch.Tensor, combine_quant: str) -> torch.Tensor:
    """What of experts' rows [N, H] arrives, float32: after the cast to fp8 and back, if combine has one."""
    if combine_quant == "fp8_blockwise":
        q, scales = quantize(rows, "fp8_per_1x128")
        return dequantize(q, scales, "fp8_per_1x128")
    wide = rows.to(torch.float32)
    return fp32_to_e4m3_bits(wide).view(FP8_DTYPE).to(torch.float32) if combine_quant == "fp8_direct_cast" else wide


def check_dispatched(case: Case, op: EpDispatchCombineOp, got: tuple[Any, ...], expected: DispatchReference) -> None:
    tokens, weights, scales, ids, total = got
    if expected.expert_counts is not None:
        check_expert_rows(case, op, got[:3], expected)
    same_bits(total, torch.tensor([expected.total_recv], dtype=total.dtype), "number of received rows")
    same_bits(op.recv_counts, expected.counts_per_source.to(torch.int32), "counts")
    same_valid_rows(expected, ids, expected.ids, "ids")
    padding = expected.padding_rows(ids).cpu()
    assert bool((padding == case.pad_id).all()), f"padding rows hold {padding.unique()} instead of {case.pad_id}"
    same_bits(op.get_dispatch_src_token_pos(), expected.valid_rows(expected.source_positions), "source positions")
    if expected.expert_counts is not None:
        return
    same_valid_rows(expected, tokens, expected.tokens, "tokens")
    if expected.weights is None:
        assert weights is None
    else:
        same_valid_rows(expected, weights, expected.weights, "weights")
    if expected.scales is None:
        assert scales is None
    else:
        same_valid_rows(expected, scales, expected.scales, "scales")


def check_expert_rows(case: Case, op: EpDispatchCombineOp, got: tuple[Any, ...], expected: DispatchReference) -> None:
    """Rows by expert, and the rows of zeros behind them: expected tensors are zero there too."""
    same_bits(op.expert_recv_count, expected.expert_counts, "expert counts")
    align = op.config.expert_alignment
    for name, tensor, right in zip(
        ("tokens", "weights", "scales"), got, (expected.tokens, expected.weights, expected.scales)
    ):
        if right is None:
            assert tensor is None, name
            continue
        if name == "scales" and op.config.column_major_scales:
            right = right.view(torch.int32) if right.dtype == torch.uint8 else right
            column_rows = -(-right.shape[1] // 4) * 4
            assert tensor.stride() == (right.shape[2] * column_rows, 1, column_rows)
        assert tensor.shape == right.shape, (name, tensor.shape, right.shape)
        for expert, count in enumerate(expected.expert_counts.tolist()):
            end = -(-count // align) * align
            rows = [each[expert, :end].reshape(-1, *each.shape[2:] or (1,)) for each in (tensor, right)]
            # a token's weights of an expert that it names twice are added
            same = same_sums if name == "weights" else same_bits
            same(rows[0], rows[1], f"{name} of local expert {expert}")


def expert_results(case: Case, dtype: torch.dtype, reference: DispatchReference, rank: int, step: int) -> torch.Tensor:
    """What the experts of a rank make of their rows in layout expert_major, [E, W * m, H]."""
    generator = torch.Generator().manual_seed(11 + case.seed + 31 * step + rank)
    return torch.randn((*reference.tokens.shape[:2], case.hidden_dim), generator=generator).to(dtype)


def expert_rows(case: Case, dtype: torch.dtype, reference: DispatchReference, rank: int, step: int) -> torch.Tensor:
    """What the experts of a rank return for its valid rows: any numbers that every rank can recompute."""
    generator = torch.Generator().manual_seed(7 + case.seed + 31 * step + rank)
    rows = torch.randn(reference.total_recv, case.hidden_dim, generator=generator).to(dtype)
    if case.unusual:
        make_results_unusual(rows, step + rank)
    return rows


def place_rows(reference: DispatchReference, valid: torch.Tensor, target: torch.Tensor) -> None:
    """Writes valid rows into a tensor of the op's layout, [R, ·] or [W, m, ·], and poison everywhere else."""
    target.view(torch.uint8).fill_(POISON_BYTE)
    start = 0
    for source, count in enumerate(reference.counts_per_source.tolist()):
        reference.rows_of_source(target, source).copy_(valid[start : start + count])
        start += count


def place_expert_rows(reference: DispatchReference, results: torch.Tensor, target: torch.Tensor) -> None:
    """Writes the valid rows of each expert into a tensor [E, W * m, H], and poison everywhere else."""
    target.view(torch.uint8).fill_(POISON_BYTE)
    for block, rows, count in zip(target, results, reference.expert_counts.tolist()):
        block[:count] = rows[:count]


def of_node(rows: Sequence[torch.Tensor], node: int, num_nodes: int) -> list[torch.Tensor]:
    """The rows of a node's ranks, and zeros in place of those of others."""
    per_node = len(rows) // num_nodes
    return [each if rank // per_node == node else torch.zeros_like(each) for rank, each in enumerate(rows)]


def combine_by_nodes(
    rows: Sequence[torch.Tensor],
    reference: list[DispatchReference],
    counts: list[int],
    dtype: torch.dtype,
    num_nodes: int,
    biases: Sequence[dict[str, torch.Tensor]] = (),
) -> list[torch.Tensor]:
    """Each rank's results: the sums of each node are rounded to dtype, and added in ascending order in float32.

    Biases, by rank, are added behind them.
    """
    if num_nodes == 1:
        totals = combine_reference(rows, reference, counts, torch.float32)
    else:
        totals = [torch.zeros(count, rows[0].shape[1]) for count in counts]
        for node in range(num_nodes):
            sums = combine_reference(of_node(rows, node, num_nodes), reference, counts, dtype)
            for total, partial in zip(totals, sums):
                total += partial.to(torch.float32)
    for total, given in zip(totals, biases):
        for name in sorted(given):
            total += given[name].to(torch.float32)
    return [total.to(dtype) for total in totals]


def make_biases(case: Case, dtype: torch.dtype, num_tokens: int, rank: int, step: int) -> dict[str, torch.Tensor]:
    """The biases of a rank's combine, by the names of its arguments."""
    generator = torch.Generator().manual_seed(13 + case.seed + 31 * step + rank)
    names = ("bias_1", "bias_0") if rank % 2 else ("bias_0", "bias_1")
    return {
        name: torch.randn(num_tokens, case.hidden_dim, generator=generator).to(dtype)
        for name in names[: case.num_biases]
    }


@dataclass
class Step:
    """One step of a case on this rank, between its dispatch and its combine."""

    case: Case
    op: EpDispatchCombineOp
    number: int
    device: torch.device
    ids: torch.Tensor
    counts: list[int]
    reference: list[DispatchReference]
    got: tuple[Any, ...]
    counts_experts: bool = False
    promised: Any = None

    @classmethod
    def dispatch(cls, case: Case, op: EpDispatchCombineOp, number: int, device: torch.device) -> Step:
        """The dispatch of a step, in halves where the case says so."""
        half = case.in_halves(number, op.config.rank, "dispatch")
        step = cls.begin(case, op, number, device, half=half)
        if half:
            step.dispatch_recv()
        return step

    @classmethod
    def begin(cls, case: Case, op: EpDispatchCombineOp, number: int, device: torch.device, *, half: bool) -> Step:
        """A whole dispatch, or its first half, after which its inputs belong to the caller again."""
        everyone = [make_inputs(case, number, r) for r in range(case.world_size)]
        inputs = everyone[op.config.rank].on(device)
        ids, counts_experts = inputs[3], not half and number % 2 == 0
        wishes: dict[str, Any] = {"step_tokens": case.stride(number), "pad_id": case.pad_id}
        if half:
            inputs = [None if each is None else each.clone() for each in inputs]
            got = op.dispatch_send(*inputs, **wishes)
            for tensor in inputs:
                if tensor is not None:
                    # a view as bytes refuses strides of 0, which a dimension of one element may have
                    memory = tensor.untyped_storage()
                    torch.empty(0, dtype=torch.uint8, device=device).set_(memory).fill_(POISON_BYTE)
        else:
            got = op.dispatch(*inputs, **wishes, call_local_expert_count=counts_experts)
        counts = [each.tokens.shape[0] for each in everyone]
        return cls(case, op, number, device, ids, counts, reference_of(case, number, everyone), got, counts_experts)

    def dispatch_recv(self) -> None:
        """The second half, which returns the same memory as the first."""
        promised, self.got = self.got, self.op.dispatch_recv()
        assert_same_memory(promised, self.got)

    def check_dispatched(self) -> None:
        config, reference = self.op.config, self.reference[self.op.config.rank]
        check_dispatched(self.case, self.op, self.got, reference)
        if self.counts_experts:
            first = 0 if config.local_ids else config.first_expert
            local = range(first, first + config.num_local_experts)
            slots = reference.valid_rows(reference.ids).flatten().tolist()
            counts = torch.tensor([slots.count(expert) for expert in local], dtype=torch.int32)
            same_bits(self.op.local_expert_count, counts, "tokens of local experts")

    def combine(self, settle: Callable[[], None] = lambda: None) -> None:
        """The combine of the step, in halves where the case says so. Its result is compared behind `settle`."""
        if self.case.in_halves(self.number, self.op.config.rank, "combine"):
            self.combine_send()
            self.combine_recv(settle)
        else:
            rows, weights, *expected = self.before_combine()
            got = self.op.combine(rows, weights, self.ids, **self.biases())
            settle()
            self.check_combined(got, *expected)

    def combine_send(self) -> None:
        """The first half, after which its inputs belong to the caller again."""
        rows, weights, *expected = self.before_combine()
        weights = None if weights is None else weights.clone()
        self.promised = self.op.combine_send(rows, weights, self.ids, **self.biases()), expected
        for tensor in (rows, weights):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(POISON_BYTE)

    def combine_recv(self, settle: Callable[[], None] = lambda: None) -> None:
        """The second half, which returns the same memory as the first."""
        promised, expected = self.promised
        got = self.op.combine_recv()
        assert_same_memory(promised, got)
        settle()
        self.check_combined(got, *expected)

    def biases(self) -> dict[str, torch.Tensor]:
        """What this rank's combine is given to add."""
        rank, dtype = self.op.config.rank, self.op.config.combined_dtype
        given = make_biases(self.case, dtype, self.counts[rank], rank, self.number)
        return {name: bias.to(self.device) for name, bias in given.items()}

    def before_combine(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """(rows, weights or None) for combine, (result, weight sums or None) that it must give."""
        case, op, got, rank = self.case, self.op, self.got, self.op.config.rank
        dtype = op.config.combined_dtype
        all_rows = [expert_rows(case, dtype, each, r, self.number) for r, each in enumerate(self.reference)]
        shape = (*got[0].shape[:-1], case.hidden_dim)
        if case.zero_copy:
            flat = op.get_registered_combine_input_buffer(dtype)[: got[0].numel() // case.hidden_dim]
            rows = flat.view(shape)
        else:
            rows = torch.empty(shape, dtype=dtype, device=self.device)
        if case.layout == "expert_major":
            results = [expert_results(case, dtype, each, r, self.number) for r, each in enumerate(self.reference)]
            place_expert_rows(self.reference[rank], results[rank].to(self.device), rows)
            all_rows = [reduce_experts_reference(each, r, dtype) for each, r in zip(results, self.reference)]
        else:
            place_rows(self.reference[rank], all_rows[rank].to(self.device), rows)
        weights = got[1] if case.combine_weights and case.layout != "expert_major" else None
        sent = [wire_rows(each, case.quant_type) for each in all_rows]
        num_nodes = case.num_nodes if op.config.uses_rings else 1
        biases = [make_biases(case, dtype, count, r, self.number) for r, count in enumerate(self.counts)]
        expected = combine_by_nodes(sent, self.reference, self.counts, dtype, num_nodes, biases)[rank]
        if weights is None:
            return rows, None, expected, None
        weight_rows = [r.valid_rows(r.weights) for r in self.reference if r.weights is not None]
        return rows, weights, expected, combine_weights_reference(weight_rows, self.reference, self.counts)[rank]

    def check_combined(
        self, got: tuple[torch.Tensor, torch.Tensor | None], expected: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        num_tokens = self.counts[self.op.config.rank]
        same_sums(got[0][:num_tokens], expected, "combine")
        if sums is not None:
            same_sums(got[1][:num_tokens], sums, "combined weights")


def assert_same_memory(promised: Sequence[torch.Tensor | None], got: Sequence[torch.Tensor | None]) -> None:
    """What a first half returns is what the second half does."""
    places = [
        [None if one is None else (one.data_ptr(), one.shape, one.dtype) for one in each] for each in (promised, got)
    ]
    assert places[0] == places[1]


def run_step(case: Case, op: EpDispatchCombineOp, number: int, device: torch.device) -> tuple[int | None, ...]:
    """One step against the oracle; the addresses of dispatch's result, 0 of tensors without elements."""
    step = Step.dispatch(case, op, number, device)
    step.check_dispatched()
    step.combine()
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in step.got)


def arena_of(context: RankContext, case: Case) -> Arena:
    """The memory of a case's op: of all ranks, or of those of a node where the hosts exchange blocks."""
    transport = case.options.items()
    if transport >= BY_HOSTS.items():
        grid = NodeGrid(case.num_nodes, case.world_size // case.num_nodes, context.rank)
        exchange = NodeAllToAll(context.group, grid, EXCHANGE_TIMEOUT_SECS)
        return NodeArena(context.group, grid, context.device, exchange)
    puts = transport >= BY_PUTS.items() and context.device.type == "cuda"
    return Arena(context.group, context.device, nvshmem.allocate_symmetric if puts else None)


def with_options(case: Case, **options: Any) -> Case:
    """The case with more options."""
    return replace(case, options=case.options | options)


def make_op(
    context: RankContext, case: Case, arena: Arena, index: int | None = None, **changes: Any
) -> EpDispatchCombineOp:
    return EpDispatchCombineOp(case.config(context.rank, **changes), arena=arena, index=index)


@contextlib.contextmanager
def built_op(context: RankContext, case: Case) -> Iterator[EpDispatchCombineOp]:
    """The op of a case, with an arena of its own."""
    with arena_of(context, case) as arena:
        yield make_op(context, case, arena)


def set_first_epoch(op: EpDispatchCombineOp, case: Case, arena: Arena) -> None:
    """Makes the case's first epoch (uint32) that of the last finished step, on every rank alike; for the wrap."""

    def set_epoch() -> None:
        op.memory.steps.fill_(case.first_epoch << STEP_SHIFT)
        of_combine = ARRIVAL_SHIFT if adds_arrived(op.config) else 0
        for region, shift in ((Region.DISPATCH_FLAGS, ARRIVAL_SHIFT), (Region.COMBINE_FLAGS, of_combine)):
            word = ((case.first_epoch << shift) + (1 << 31)) % (1 << 32) - (1 << 31)
            op.memory.view(region).fill_(word)

    if case.first_epoch:
        arena.together("setting the epoch", set_epoch)


def read_bodies(group: str, functions: dict[str, Any]) -> dict[str, tuple[Callable[..., None], Case]]:
    """A group of special_cases.json: by name a body, which is one of the functions, and the case that it gets."""
    return {
        name: (functions[body], Case(**fields)) for name, (body, fields) in read_table("special_cases")[group].items()
    }


def run_case(context: RankContext, case: Case) -> None:
    """Every step of the case on one op."""
    with built_op(context, case) as op:
        set_first_epoch(op, case, op.arena)
        run_steps(case, op, context.device)
        op.check()


def run_steps(case: Case, op: EpDispatchCombineOp, device: torch.device) -> None:
    """Every step of the case against the oracle; results keep their addresses."""
    addresses = [run_step(case, op, number, device) for number in range(case.num_steps)]
    for of_one_tensor in zip(*addresses):
        # torch gives a tensor without elements the address 0
        assert len(set(of_one_tensor) - {0}) <= 1
