"""AdapterOp: checks, casts and the record of the dispatched ids for ops without kernels of this package."""

from __future__ import annotations

import abc
import functools
import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from ep_a2a.config import FP8_DTYPE
from ep_a2a.errors import ForeignIndicesError, UnsupportedError
from ep_a2a.memory.guards import StreamOrder, is_capturing, outside_modes
from ep_a2a.ops.arguments import NO_BIASES, NO_WISH, LaunchWish, StepInputs
from ep_a2a.ops.base_op import BaseOp, OpenStep
from ep_a2a.ops.ignored_options import warn_of_fields, warn_once
from ep_a2a.ops.inputs import check_apart, check_combine, check_dispatch, check_token_rows, travelling_scales
from ep_a2a.ops.op_sizes import leading_dims
from ep_a2a.quantization import quantize

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.interface import CombineResult, DispatchResult
    from ep_a2a.ops.arguments import Biases, CombineInputs, Stages


class RowsBack(NamedTuple):
    """The checked arguments of a combine.

    Attributes:
        rows: the experts' rows, in the shape of dispatch's tokens.
        weights: float32 [..., K] to sum, or None.
        step: the arguments of the dispatch, as they travelled.
        out: [T, H] to write to, or None.
        biases: bias_0 and bias_1, [T, H] or None.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    step: StepInputs
    out: torch.Tensor | None
    biases: Biases = NO_BIASES


class AdapterStep(NamedTuple):
    """The facts about a dispatch that its combine needs.

    Attributes:
        inputs: the arguments as they travelled, with a copy of the ids.
        ids: the caller's tensor.
        num_writes: torch's count of writes to `ids` at the dispatch; None if torch does not count them.
    """

    inputs: StepInputs
    ids: torch.Tensor
    num_writes: int | None


class AdapterOp(BaseOp[StepInputs, AdapterStep, RowsBack]):
    """An op whose rows are moved by collectives or by another project's library.

    A subclass moves rows in `_send` and `_bring_back`, after all checks on the host. The first half of a split call
    does the whole call; the second half returns the result. Launch numbers, and config fields of this package's kernels
    that are not in `takes`, have no effect; a warning says so once.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    """Names in KERNEL_FIELDS that have an effect on this op."""

    adds_biases = False
    """Whether `_bring_back` adds the biases, before it rounds the sums; else they are added to rounded sums."""

    casts_inside = False
    """Whether `_send` casts the tokens itself."""

    def __init__(self, config: EpDispatchCombineConfig, device: torch.device) -> None:
        super().__init__(config, device, StreamOrder())
        warn_of_fields(type(self).__name__, config, self.takes)

    @abc.abstractmethod
    def _send(self, step: StepInputs) -> DispatchResult:
        """Move the rows to the experts' ranks and return dispatch's result."""

    @abc.abstractmethod
    def _bring_back(self, given: RowsBack) -> CombineResult:
        """Move the experts' rows back, add them, and return combine's result."""

    def _checked_wish(self, block_num: int, rdma_block_num: int, warp_per_block: int) -> LaunchWish:
        warn_once(type(self).__name__, ("block_num, rdma_block_num and warp_per_block of calls",))
        return NO_WISH

    def _prepare_dispatch(self, step: StepInputs) -> StepInputs:
        check_dispatch(self.config, self.device, step)
        return step

    def _run_dispatch(self, call: StepInputs, stages: Stages, wish: LaunchWish) -> OpenStep[AdapterStep]:
        ids, tokens, scales = call.ids, call.tokens, call.scales
        if not self.casts_inside:
            tokens, scales = self._cast(tokens, scales)
        inputs = call._replace(tokens=tokens, scales=scales, ids=ids.clone())
        dispatched = self._send(inputs)
        next_call = "combine" if stages.receive else "dispatch_recv"
        return OpenStep(AdapterStep(inputs, ids, _num_writes(ids)), dispatched, next_call)

    @property
    def _open_inputs(self) -> StepInputs | None:
        """The arguments of the open step's dispatch, as they travelled; None between two steps."""
        return None if self._step is None else self._step.facts.inputs

    def _cast(self, tokens: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens and scales to send; torch casts them where the config asks for a cast."""
        config = self.config
        if config.casts_in_dispatch and tokens.dtype != FP8_DTYPE:
            q, made = quantize(tokens, config.dispatch_quant, config.scale_format, scales)
            return q, None if config.takes_scale else made
        return tokens, travelling_scales(config, tokens, scales)

    def _prepare_combine(self, step: OpenStep[AdapterStep], given: CombineInputs) -> RowsBack:
        inputs, lead = step.facts.inputs, tuple(step.dispatched.tokens.shape[:-1])
        rows, weights, indices, out, biases = given
        # beside no rows they are those of all rows, which other ranks pass, too
        if isinstance(weights, torch.Tensor) and weights.numel() == 0 and 0 not in lead:
            weights = None
        if isinstance(rows, torch.Tensor) and rows.dim() == 2 and self._is_registered(rows):
            rows = rows[: math.prod(lead)]  # the whole registered buffer may be passed
        check_combine(self.config, self.device, given._replace(rows=rows, weights=weights), lead, inputs.num_tokens)
        self._check_own(indices, step.facts)
        self._check_weights(weights)
        bias_0, bias_1 = biases
        check_token_rows(self.config, self.device, inputs.num_tokens, out=out, bias_0=bias_0, bias_1=bias_1)
        if out is not None:
            check_apart("out", out, rows, "the rows to be combined")
        rows = rows.view(*lead, rows.shape[-1])
        weights = None if weights is None else weights.view(*lead, weights.shape[-1])
        return RowsBack(rows, weights, inputs, out, biases)

    def _run_combine(
        self, step: OpenStep[AdapterStep], call: RowsBack, stages: Stages, wish: LaunchWish
    ) -> CombineResult:
        # whatever comes of it, the step is over
        self._end_step()
        # a bias may be `out`, or the result of an earlier combine, whose memory a library may use again
        biases = [] if self.adds_biases else [bias.clone() for bias in call.biases if bias is not None]
        combined = self._bring_back(call)
        for bias in biases:
            total = combined.tokens[: call.step.num_tokens]
            total.copy_(total.float() + bias)
        return combined

    def _check_own(self, indices: torch.Tensor | None, given: AdapterStep) -> None:
        """Raise ForeignIndicesError unless `indices` is None, or the dispatched tensor, or equal to it."""
        if indices is None:
            return
        is_same = indices.data_ptr() == given.ids.data_ptr()
        if is_same and _num_writes(given.ids) == _num_writes(indices) == given.num_writes:
            return
        if is_capturing(self.device):
            raise UnsupportedError(
                "combine's indices to be the tensor given to dispatch, or None, in a capture",
                "another tensor",
                "Pass that tensor or None.",
            )
        if not torch.equal(indices, given.inputs.ids):
            raise ForeignIndicesError("combine's indices to be those given to this rank's dispatch", "others")

    def _check_weights(self, weights: torch.Tensor | None) -> None:
        """Raise if combine cannot sum weights."""

    @functools.cached_property
    @outside_modes()
    def _combine_input(self) -> torch.Tensor:
        lead = leading_dims(self.config, self.config.max_num_inp_token_per_rank).rows
        shape = (math.prod(lead), self.config.hidden_dim)
        return torch.empty(shape, dtype=self.config.combined_dtype, device=self.device)

    def _is_registered(self, rows: torch.Tensor) -> bool:
        """Whether `rows` is the registered combine buffer; combine then takes its first rows."""
        return "_combine_input" in self.__dict__ and rows.data_ptr() == self._combine_input.data_ptr()

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Memory for combine's input: [R, H] of combine_dtype, in expert_major [E * R, H], with R for M tokens.

        The first call allocates it. It saves no copy.
        """
        self._check_buffer_request(dtype, hidden_dim)
        return self._combine_input

    def set_max_sms(self, max_sms: int, *, shares_sm: bool = False) -> None:
        """Without effect, which a warning says once."""
        if max_sms or shares_sm:
            warn_once(type(self).__name__, ("set_max_sms",))

    def check(self) -> None:
        """Raise ClosedError after close. All other errors are raised by the call that causes them."""

    @outside_modes()
    def reset(self) -> None:
        """Make the op usable again after an unfinished step. Must be called on every rank."""
        self.check()
        step = self._step
        self._end_step()
        if step is not None and step.next_call != "combine_recv":
            self._abandon(step)

    def _abandon(self, step: OpenStep[AdapterStep]) -> None:
        """Undo the effects of an unfinished step; a subclass without state has none."""


def _num_writes(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes to the tensor; None for inference tensors, whose writes torch does not count."""
    return None if tensor.is_inference() else tensor._version
