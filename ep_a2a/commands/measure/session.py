"""Holds what moves one workload's tokens, ready to be checked and timed; among them this package's op."""

import abc
from typing import Any, ClassVar, NamedTuple

import torch

from ep_a2a.commands.measure.timing import Timer
from ep_a2a.commands.measure.workload import Inputs, Workload
from ep_a2a.config import (
    CompiledCalls,
    EpDispatchCombineConfig,
    EpDispatchCombineKernelType,
    Layout,
    QuantType,
    num_owned_experts,
)
from ep_a2a.config.enums import inter_node_kernel
from ep_a2a.errors import CheckFailedError
from ep_a2a.interface import DispatchResult
from ep_a2a.memory.arena import Arena
from ep_a2a.ops.factory import OpFactory
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.testing.worker import RankContext
from ep_a2a.topology import classify, gather_report


class Session(abc.ABC):
    """Something that is ready to move one workload's tokens. All methods but `check_timed` are collective.

    Attributes:
        details: remarks for the report, such as launch numbers.
    """

    def __init__(self) -> None:
        self.details: dict[str, Any] = {}

    @abc.abstractmethod
    def check(self) -> None:
        """Runs what will be timed and compares the result with the expected one.

        Raises:
            CheckFailedError: the result is wrong on this rank.
        """

    @abc.abstractmethod
    def measure(self, timer: Timer) -> dict[str, Any]:
        """Returns the times of a session that has passed its check, by name; the same on all ranks."""

    def check_timed(self) -> None:  # noqa: B027  most raise while they are timed
        """Checks, after the timing, for failures that kernels can only record. Local.

        Raises:
            EpA2AError: a timed call has not done its work.
        """

    def close(self) -> None:  # noqa: B027  some hold nothing
        """Gives memory and communicators back. Called once, on every rank."""


class RoundTrip(Session):
    """A session that has its memory, inputs and experts' rows, and does dispatch and combine.

    They alternate, on the current stream, and are all that is timed. On a GPU they only queue work, so that a CUDA
    graph can capture and replay them.
    """

    @abc.abstractmethod
    def dispatch(self) -> Any:
        """Sends this rank's tokens to the ranks of their experts; returns what combine needs of it."""

    @abc.abstractmethod
    def combine(self, dispatched: Any) -> torch.Tensor:
        """Brings the experts' rows back and sums them: this rank's result `[T, H]`."""

    def round_trip(self) -> torch.Tensor:
        """Runs dispatch, then combine; returns combine's result."""
        return self.combine(self.dispatch())

    def measure(self, timer: Timer) -> dict[str, Any]:
        """Returns the times of dispatch, combine and their round trip, as `Timer.measure` names them."""
        return timer.measure(self.dispatch, self.combine)


class Received(NamedTuple):
    """Rows as communication hands them to a layer's experts; R rows of which those without an own expert are skipped.

    Attributes:
        rows: `[R, H]`, bf16 or float8_e4m3fn.
        scales: float32 `[R, H / 128]` of fp8 rows, else None.
        ids: global expert ids int32 `[R, K]`; ids of other ranks' experts and padding (-1) are skipped.
        weights: router weights float32 `[R, K]`.
        out: bf16 `[R, H]` to leave the sums in; rows without an own expert become zeros.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


class InputsRoundTrip(RoundTrip):
    """A round trip of one rank's tokens, checked with identity experts.

    Args:
        workload: what moves.
        context: this rank.
        inputs: tokens, ids and weights of a layer, at addresses from which each dispatch reads them again; None draws
            those of the workload.

    Attributes:
        casts_before: whether dispatch takes tokens that have been cast. A round trip casts them once, untimed.
        sent, scales: what dispatch sends of the tokens; scales are None without a cast before.
    """

    casts_before: ClassVar[bool] = True

    def __init__(self, workload: Workload, context: RankContext, inputs: Inputs | None = None) -> None:
        super().__init__()
        self._workload, self._context = workload, context
        self._x, self._ids, self._weights = inputs or workload.inputs(context.rank, context.device)
        self.sent: torch.Tensor = self._x
        self.scales: torch.Tensor | None = None
        if self.casts_before and workload.quant != QuantType.NONE:
            self.sent, self.scales = quantize(self._x, workload.quant)
        self._rows = torch.empty(0)

    @abc.abstractmethod
    def run_identity_experts(self, dispatched: Any) -> None:
        """Leaves the rows that dispatch has brought, as they are, where combine reads them. Not timed."""

    def received(self, dispatched: Any) -> Received:
        """Returns what dispatch has brought, for a layer's experts."""
        found: Received = dispatched
        return found

    def check(self) -> None:
        """Compares a round trip on the rows that will be timed: every dispatch gives the same ones."""
        dispatched = self.dispatch()
        self.run_identity_experts(dispatched)
        check_round_trip(self._workload, self._x, self._copies(), self.combine(dispatched))

    def _copies(self) -> torch.Tensor:
        """Returns the factor of identity experts for each token, `[T]`: the number of ranks that it goes to."""
        return self._workload.num_distinct_ranks(self._context.rank)

    def _rows_of(self, tokens: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Returns a copy of received tokens `[..., H]` in bf16, times their scales, if any."""
        if scales is None:
            return tokens.clone()
        flat_scales = scales.reshape(-1, scales.shape[-1])
        rows = dequantize(tokens.flatten(0, -2), flat_scales, self._workload.quant, torch.bfloat16)
        return rows.view(tokens.shape)


class OpRoundTrip(InputsRoundTrip):
    """The op with one workload's inputs. Experts' rows lie in memory of their own, those of a layer in the op's.

    Args:
        workload, context, inputs: as of InputsRoundTrip.
        packed: whether the rows of a rank follow those of the rank before, instead of T rows behind.
        changes: fields of the op's config.

    Attributes:
        op: the op.
    """

    casts_before = False

    def __init__(
        self,
        workload: Workload,
        context: RankContext,
        inputs: Inputs | None = None,
        *,
        packed: bool = False,
        **changes: Any,
    ) -> None:
        super().__init__(workload, context, inputs)
        self._bounds = workload.counts if packed else None
        self._arena = Arena(context.group, context.device)
        # It makes arenas and transports between nodes where the op needs them.
        self._factory = OpFactory(self._arena)
        try:
            config = make_config(workload, context.rank, **changes)
            topology = classify(gather_report(context.group), config.gpu_per_node)
            self.op = self._factory.make(config, topology, None)
        except Exception:
            self._close_memory()
            raise
        if inputs is not None:
            self._rows = self.op.get_registered_combine_input_buffer(torch.bfloat16)
            if packed:
                self._rows = self._rows[: sum(workload.counts)]

    def dispatch(self) -> DispatchResult:
        """Sends tokens, ids and router weights to the experts' ranks."""
        return self.op.dispatch(self.sent, self._weights, self.scales, self._ids, step_tokens=self._bounds)

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Combines the experts' rows, which lie ready."""
        result, _ = self.op.combine(self._rows, None, None)
        return result[: len(self._x)]

    def run_identity_experts(self, dispatched: DispatchResult) -> None:
        """Leaves the received rows as the experts'."""
        layout = self._workload.layout
        counts = self.op.expert_recv_count if layout == Layout.EXPERT_MAJOR else self.op.recv_counts
        if layout == Layout.COMPACT:
            counts = counts.sum()
        self._rows = self._rows_of(dispatched.tokens, dispatched.scales)
        # NaN, so that the check finds a combine that reads rows which were not received.
        is_received = torch.arange(self._rows.shape[-2], device=counts.device) < counts[..., None]
        self._rows.masked_fill_(~is_received[..., None], torch.nan)

    def received(self, dispatched: DispatchResult) -> Received:
        """Returns the results of dispatch, row after row, and the op's own memory for the experts' rows."""
        tokens, weights, scales, ids, _ = dispatched
        assert weights is not None, "the weights travel with the tokens"
        flat_scales = None if scales is None else scales.flatten(0, -2)
        return Received(tokens.flatten(0, -2), flat_scales, ids.flatten(0, -2), weights.flatten(0, -2), self._rows)

    def check(self) -> None:
        """Checks a round trip on the rows that will be timed, and that no kernel has recorded a failure."""
        super().check()
        self.op.check()

    def check_timed(self) -> None:
        """Checks that no kernel has recorded a failure."""
        self.op.check()

    def close(self) -> None:
        """Closes the op and gives its memory back."""
        self.op.close()
        self._close_memory()

    def _copies(self) -> torch.Tensor:
        weighs = self._workload.layout == Layout.EXPERT_MAJOR
        return self._workload.valid_weights(self._context.rank) if weighs else super()._copies()

    def _close_memory(self) -> None:
        self._factory.close()
        self._arena.close()


def make_config(workload: Workload, rank: int, **changes: Any) -> EpDispatchCombineConfig:
    """Returns the op's config for a workload, with changes by field.

    Raises:
        ConfigError: no op can have it.
    """
    kernel_type = EpDispatchCombineKernelType.IntraNode
    if workload.num_nodes > 1:
        kernel_type = inter_node_kernel(workload.tokens)
    values: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "rank": rank,
        "world_size": workload.ranks,
        "hidden_dim": workload.hidden,
        "scale_dim": 0,
        "scale_type_size": 0,
        "max_token_type_size": torch.bfloat16.itemsize,
        "max_num_inp_token_per_rank": workload.tokens,
        "num_experts_per_rank": num_owned_experts(workload.experts, workload.ranks, rank),
        "num_experts_per_token": workload.topk,
        "num_experts": workload.experts,
        "quant_type": workload.quant if workload.combine_quant == QuantType.NONE else workload.combine_quant,
        "dispatch_quant_type": None if workload.combine_quant == QuantType.NONE else workload.quant,
        # Only these calls are made. Each further form takes seconds to compile.
        "compiled_calls": CompiledCalls.SERVING,
        "layout": workload.layout,
        "max_sms": workload.max_sms,
        "kernel_type": kernel_type,
        "gpu_per_node": workload.ranks // workload.num_nodes,
    }
    return EpDispatchCombineConfig(**values | changes)


def check_round_trip(workload: Workload, x: torch.Tensor, copies: torch.Tensor, got: torch.Tensor) -> None:
    """Compares a round trip through identity experts with x times the rows, or weights, that are summed per token.

    Args:
        workload: gives the tolerance.
        x: this rank's tokens `[T, H]`.
        copies: factor that identity experts multiply each token by, `[T]`: `workload.num_distinct_ranks(rank)` where
            rows are summed as they are, `workload.valid_weights(rank)` where router weights are applied on the way.
        got: `[T, H]` of any floating point dtype, on any device.

    Raises:
        CheckFailedError: a shape is wrong, a value is not finite, or an element is too far away.
    """
    if tuple(got.shape) != tuple(x.shape):
        raise CheckFailedError(f"a result {tuple(x.shape)}", f"{tuple(got.shape)}")
    want = x.to(torch.float32) * copies.to(x.device, torch.float32)[:, None]
    relative, absolute = workload.tolerance
    # Rows have scales: an element that is small beside its row loses more than its own last bits.
    allowed = relative * want.abs() + absolute * want.abs().amax(1, keepdim=True)
    error = (got.to(x.device, torch.float32) - want).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        token, element = (int(number) for number in wrong.nonzero()[0])
        raise CheckFailedError(
            f"x times the rows summed: {want[token, element].item():g} in token {token}, element {element}",
            f"{got[token, element].item():g}; {int(wrong.sum())} of {wrong.numel()} elements are off",
        )
