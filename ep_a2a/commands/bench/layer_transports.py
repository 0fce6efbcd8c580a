"""Moves the tokens of the benchmark's MoE layer: by this package's op, FlashInfer, or NCCL's collectives.

A transport's own casts and marks on padding count as communication.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

import torch

from ep_a2a.commands.bench.contenders import make_contender
from ep_a2a.commands.bench.layer_model import Received, quantize_rows, run_experts
from ep_a2a.commands.bench.native import make_config
from ep_a2a.commands.bench.nccl import all_gather, reduce_scatter_single
from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE, Layout, QuantType
from ep_a2a.errors import UnknownNameError, UnsupportedError
from ep_a2a.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.commands.bench.layer_model import Gate, MoEWeights
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.interface import DispatchResult
    from ep_a2a.testing.worker import RankContext

PAD_ID = -1


class Transport(abc.ABC):
    """Dispatch and combine of one batch, whose gate has fixed addresses. Made collectively; graph-safe.

    Args:
        workload: shapes; layout rank_major, quant_type "none" or "fp8_per_1x128".
        gate: tokens, ids and router weights, read at each dispatch.
        weights: the experts'.
        context: this rank and its group.
    """

    name: ClassVar[str]

    def __init__(self, workload: Workload, gate: Gate, weights: MoEWeights, context: RankContext) -> None:
        self.workload, self.gate, self.weights, self.context = workload, gate, weights, context

    @abc.abstractmethod
    def dispatch(self) -> Received:
        """Brings the tokens to their experts' ranks."""

    @abc.abstractmethod
    def combine(self) -> torch.Tensor:
        """Brings the rows that the experts left in `Received.out` back: the layer's result `[T, H]`."""

    def close(self) -> None:  # noqa: B027  not all hold memory
        """Gives memory back. Called once, on every rank."""

    def run(self) -> torch.Tensor:
        """Runs the whole layer, part after part."""
        self.gate()
        run_experts(self.dispatch(), self.weights)
        return self.combine()

    def computation(self) -> Callable[[], torch.Tensor]:
        """Returns the same gate and experts without communication, on a copy of received rows. Collective."""
        self.gate()
        copy = Received(*(None if each is None else each.clone() for each in self.dispatch()))  # type: ignore[arg-type]
        self.combine()

        def compute() -> torch.Tensor:
            self.gate()
            run_experts(copy, self.weights)
            return copy.out

        return compute


class OpTransport(Transport):
    """This package's op: casts inside dispatch, zero-copy combine.

    Args:
        arena, index: the op's memory; ops in flight together have different indices. None: an arena of its own.
    """

    name = "ep_a2a"

    def __init__(
        self,
        workload: Workload,
        gate: Gate,
        weights: MoEWeights,
        context: RankContext,
        arena: Arena | None = None,
        index: int = 0,
    ) -> None:
        from ep_a2a.ops.op import EpDispatchCombineOp

        super().__init__(workload, gate, weights, context)
        self._own_arena = None
        if arena is None:
            arena = self._own_arena = Arena(context.group, context.device)
        self.op = EpDispatchCombineOp(make_config(workload, context.rank), arena=arena, index=index)
        self.rows = self.op.get_registered_combine_input_buffer(workload.dtype)

    def dispatch(self) -> Received:
        """Sends tokens, ids and router weights to the experts' ranks."""
        gate = self.gate
        return self.received(self.op.dispatch(gate.x, gate.weights, None, gate.ids, pad_id=PAD_ID))

    def received(self, result: DispatchResult) -> Received:
        """Returns the results of the op's dispatch, row after row."""
        tokens, weights, scales, ids, _ = result
        if weights is None:
            raise UnsupportedError("router weights to travel with the tokens", "none")
        flat_scales = None if scales is None else scales.flatten(0, 1)
        return Received(tokens.flatten(0, 1), flat_scales, ids.flatten(0, 1), weights.flatten(0, 1), self.rows)

    def combine(self) -> torch.Tensor:
        """Brings the experts' rows back, summed."""
        return self.op.combine(self.rows, None, None)[0][: self.workload.num_tokens]

    def close(self) -> None:
        """Closes the op, and its arena unless it was given."""
        self.op.close()
        if self._own_arena is not None:
            self._own_arena.close()


class _CastTransport(Transport):
    """A transport whose library does not cast: tokens travel as they are, or cast by a launch before."""

    def __init__(self, workload: Workload, gate: Gate, weights: MoEWeights, context: RankContext) -> None:
        super().__init__(workload, gate, weights, context)
        x = gate.x
        self._tokens = x
        self._scales: torch.Tensor | None = None
        if workload.quant_type != QuantType.NONE:
            self._tokens = torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device)
            self._scales = torch.empty(x.shape[0], x.shape[1] // FP8_GROUP_SIZE, device=x.device)

    def _cast(self) -> None:
        if self._scales is not None:
            quantize_rows(self.gate.x, self._tokens, self._scales)


class FlashInferTransport(_CastTransport):
    """FlashInfer's one-sided kernels; a cast before dispatch, and a launch after it that marks padding."""

    name = "flashinfer"

    def __init__(self, workload: Workload, gate: Gate, weights: MoEWeights, context: RankContext) -> None:
        from ep_a2a.commands.bench.flashinfer import OneSidedExchange

        super().__init__(workload, gate, weights, context)
        payloads = {"x": self._tokens, "ids": gate.ids, "weights": gate.weights}
        if self._scales is not None:
            payloads["scales"] = self._scales
        self._exchange = OneSidedExchange(payloads, workload, context)

    def dispatch(self) -> Received:
        """Sends tokens, ids and router weights to the experts' ranks."""
        self._cast()
        received = self._exchange.dispatch()
        self._exchange.mark_padding("ids", PAD_ID)
        flat = {name: each.flatten(0, 1) for name, each in received.items()}
        rows = self._exchange.combine_rows.flatten(0, 1)
        return Received(flat["x"], flat.get("scales"), flat["ids"], flat["weights"], rows)

    def combine(self) -> torch.Tensor:
        """Brings the experts' rows back, summed."""
        return self._exchange.combine()

    def close(self) -> None:
        """Unmaps the workspace. Collective."""
        self._exchange.close()


class AllGatherReduceScatterTransport(_CastTransport):
    """vLLM's default: every rank gets all tokens, runs its own experts on them, and sums are reduce-scattered."""

    name = "nccl_agrs"

    def __init__(self, workload: Workload, gate: Gate, weights: MoEWeights, context: RankContext) -> None:
        super().__init__(workload, gate, weights, context)
        scales = [] if self._scales is None else [self._scales]
        # fp8 travels as bytes: NCCL knows no sum of it, and some versions do not know the type.
        tokens = self._tokens if self._scales is None else self._tokens.view(torch.uint8)
        self._sent = [tokens, gate.ids, gate.weights, *scales]
        num_rows = workload.world_size * workload.num_tokens
        self._gathered = [each.new_empty(num_rows, each.shape[1]) for each in self._sent]
        self._rows = gate.x.new_zeros(num_rows, workload.hidden_dim)
        self._result = torch.empty_like(gate.x)

    def dispatch(self) -> Received:
        """Gathers tokens, ids and router weights of all ranks."""
        self._cast()
        all_gather(self.context, self._gathered, self._sent)
        tokens, ids, weights, *scales = self._gathered
        return Received(tokens.view(self._tokens.dtype), scales[0] if scales else None, ids, weights, self._rows)

    def combine(self) -> torch.Tensor:
        """Brings the experts' rows back, summed."""
        reduce_scatter_single(self._result, self._rows, group=self.context.group)
        return self._result


TRANSPORTS: dict[str, type[Transport]] = {
    each.name: each for each in (OpTransport, FlashInferTransport, AllGatherReduceScatterTransport)
}


def unavailable(name: str, workload: Workload, device: torch.device) -> str | None:
    """Returns why a transport cannot run here, as FlashInfer's contender says; None where it can. Local."""
    return make_contender(name).unavailable(workload, device) if name == "flashinfer" else None


def check_transports(names: tuple[str, ...], workload: Workload) -> None:
    """Checks a choice of transports and a workload.

    Raises:
        UnknownNameError: a name is not in TRANSPORTS.
        UnsupportedError: the layer cannot run this workload.
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
