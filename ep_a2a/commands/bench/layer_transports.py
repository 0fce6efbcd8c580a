"""Moves the tokens of the benchmark's MoE layer: by this package's op, FlashInfer, or NCCL's collectives.

A transport's own casts and marks on padding count as communication.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

import torch

from ep_a2a.commands.bench.layer_experts import Received, quantize_rows
from ep_a2a.commands.bench.native import make_config
from ep_a2a.commands.bench.nccl import all_gather, reduce_scatter_single
from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE, Layout, QuantType
from ep_a2a.errors import UnknownNameError, UnsupportedError
from ep_a2a.memory.arena import Arena

if TYPE_CHECKING:
    from ep_a2a.commands.bench.contender import BenchContext
    from ep_a2a.commands.bench.layer_model import Gate
    from ep_a2a.commands.bench.workload import Workload

PAD_ID = -1


class Transport(abc.ABC):
    """Dispatch and combine of one batch, whose gate has fixed addresses. Made collectively; graph-safe.

    Args:
        workload: shapes; layout rank_major, quant_type "none" or "fp8_per_1x128".
        gate: tokens, ids and weights, read at each dispatch.
        context: this rank and its group.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def __init__(self, workload: Workload, gate: Gate, context: BenchContext) -> None: ...

    @classmethod
    def unavailable(cls, workload: Workload, device: torch.device) -> str | None:
        """Returns why it cannot run here; None where it can. Local."""
        return None

    @abc.abstractmethod
    def dispatch(self) -> Received:
        """Brings the tokens to their experts' ranks."""

    @abc.abstractmethod
    def combine(self) -> torch.Tensor:
        """Brings what the experts left in `Received.out` back: the layer's result `[T, H]`."""

    def close(self) -> None:  # noqa: B027  most have nothing to do
        """Gives memory back. Called once, on every rank."""


class OpTransport(Transport):
    """This package's op: casts inside dispatch, zero-copy combine."""

    name = "ep_a2a"

    def __init__(
        self, workload: Workload, gate: Gate, context: BenchContext, arena: Arena | None = None, index: int = 0
    ) -> None:
        from ep_a2a.ops.op import EpDispatchCombineOp

        self._gate, self._own_arena = gate, arena is None
        self.arena = Arena(context.group, context.device) if arena is None else arena
        self.op = EpDispatchCombineOp(make_config(workload, context.rank), arena=self.arena, index=index)
        self.rows = self.op.get_registered_combine_input_buffer(workload.dtype)
        self.num_tokens = workload.num_tokens

    def dispatch(self) -> Received:
        """Tokens, ids and router weights to the experts' ranks."""
        tokens, weights, scales, ids, _ = self.op.dispatch(
            self._gate.x, self._gate.weights, None, self._gate.ids, pad_id=PAD_ID
        )
        return self.received(tokens, weights, scales, ids)

    def received(
        self, tokens: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, ids: torch.Tensor
    ) -> Received:
        """Returns the results of the op's dispatch, row after row."""
        if weights is None:
            raise UnsupportedError("router weights to travel with the tokens", "none")
        flat_scales = None if scales is None else scales.flatten(0, 1)
        return Received(tokens.flatten(0, 1), flat_scales, ids.flatten(0, 1), weights.flatten(0, 1), self.rows)

    def combine(self) -> torch.Tensor:
        """The experts' rows back, summed."""
        return self.op.combine(self.rows, None, None)[0][: self.num_tokens]

    def close(self) -> None:
        """Closes the op, and its arena unless it was given."""
        self.op.close()
        if self._own_arena:
            self.arena.close()


class _Cast:
    """The tokens as they travel where the library does not cast: as they are, or cast by a launch before."""

    def __init__(self, workload: Workload, x: torch.Tensor) -> None:
        self._x, self.tokens = x, x
        self.scales: torch.Tensor | None = None
        if workload.quant_type != QuantType.NONE:
            self.tokens = torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device)
            self.scales = torch.empty(x.shape[0], x.shape[1] // FP8_GROUP_SIZE, device=x.device)

    def __call__(self) -> None:
        if self.scales is not None:
            quantize_rows(self._x, self.tokens, self.scales)


class FlashInferTransport(Transport):
    """FlashInfer's one-sided kernels; a cast before dispatch, and a launch after it that marks padding."""

    name = "flashinfer"

    def __init__(self, workload: Workload, gate: Gate, context: BenchContext) -> None:
        from ep_a2a.commands.bench.flashinfer import OneSidedExchange

        self._cast = _Cast(workload, gate.x)
        payloads = {"x": self._cast.tokens, "ids": gate.ids, "weights": gate.weights}
        if self._cast.scales is not None:
            payloads["scales"] = self._cast.scales
        self._exchange = OneSidedExchange(
            payloads, gate.ids, num_experts=workload.num_experts, max_num_tokens=workload.num_tokens,
            combine_row=(workload.hidden_dim, workload.dtype), context=context,
        )  # fmt: skip

    @classmethod
    def unavailable(cls, workload: Workload, device: torch.device) -> str | None:
        """Returns the answer of the contender of this name."""
        from ep_a2a.commands.bench.flashinfer import FlashInferContender

        return FlashInferContender().unavailable(workload, device)

    def dispatch(self) -> Received:
        """Tokens, ids and router weights to the experts' ranks."""
        self._cast()
        received = self._exchange.dispatch()
        self._exchange.mark_padding("ids", PAD_ID)
        flat = {name: each.flatten(0, 1) for name, each in received.items()}
        rows = self._exchange.combine_rows.flatten(0, 1)
        return Received(flat["x"], flat.get("scales"), flat["ids"], flat["weights"], rows)

    def combine(self) -> torch.Tensor:
        """The experts' rows back, summed."""
        return self._exchange.combine()

    def close(self) -> None:
        """Unmaps the workspace. Collective."""
        self._exchange.close()


class AllGatherReduceScatterTransport(Transport):
    """vLLM's default: every rank gets all tokens, runs its own experts on them, and sums are reduce-scattered."""

    name = "nccl_agrs"

    def __init__(self, workload: Workload, gate: Gate, context: BenchContext) -> None:
        self._context, self._cast = context, _Cast(workload, gate.x)
        scales = [] if self._cast.scales is None else [self._cast.scales]
        # fp8 travels as bytes: NCCL knows no sum of it, and some versions not the type either.
        tokens = self._cast.tokens if self._cast.scales is None else self._cast.tokens.view(torch.uint8)
        self._sent = [tokens, gate.ids, gate.weights, *scales]
        num_rows = workload.world_size * workload.num_tokens
        self._gathered = [each.new_empty(num_rows, each.shape[1]) for each in self._sent]
        self._rows = gate.x.new_zeros(num_rows, workload.hidden_dim)
        self._result = torch.empty_like(gate.x)

    def dispatch(self) -> Received:
        """Tokens, ids and router weights to the experts' ranks."""
        self._cast()
        all_gather(self._context, self._gathered, self._sent)
        tokens, ids, weights, *scales = self._gathered
        return Received(tokens.view(self._cast.tokens.dtype), scales[0] if scales else None, ids, weights, self._rows)

    def combine(self) -> torch.Tensor:
        """The experts' rows back, summed."""
        reduce_scatter_single(self._result, self._rows, group=self._context.group)
        return self._result


TRANSPORTS: dict[str, type[Transport]] = {
    each.name: each for each in (OpTransport, FlashInferTransport, AllGatherReduceScatterTransport)
}


def check_transports(names: tuple[str, ...], workload: Workload) -> None:
    """Checks a choice of transports and a workload.

    Raises:
        UnknownNameError: a name is not in TRANSPORTS.
        UnsupportedError: the layer cannot be run on this workload.
    """
    for name in names:
        if name not in TRANSPORTS:
            raise UnknownNameError(f"transports out of {', '.join(TRANSPORTS)}", repr(name))
    if workload.layout != Layout.RANK_MAJOR or workload.dtype != torch.bfloat16:
        raise UnsupportedError("bfloat16 tokens and layout 'rank_major'", f"{workload.dtype}, {workload.layout!r}")
    if workload.quant_type not in (QuantType.NONE, QuantType.FP8_PER_1X128) or workload.num_tokens < 1:
        raise UnsupportedError(
            "quant_type 'none' or 'fp8_per_1x128', and a token on each rank",
            f"{workload.quant_type!r}, {workload.num_tokens}",
        )
