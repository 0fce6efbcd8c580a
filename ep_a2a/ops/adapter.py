"""Ops that are no kernels of this package: their checks, casts and the routing record, written once."""

from __future__ import annotations

import abc
import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from ep_a2a.config import FP8_DTYPE, ScaleFormat
from ep_a2a.errors import ClosedError, ForeignIndicesError, UnsupportedError
from ep_a2a.memory.use_order import StreamOrder, is_capturing
from ep_a2a.ops.arguments import StepInputs
from ep_a2a.ops.base_op import BaseOp, OpenStep
from ep_a2a.ops.ignored_options import warn_of_fields, warn_of_launch, warn_of_max_sms
from ep_a2a.ops.inputs import check_biases, check_combine, check_dispatch, check_out
from ep_a2a.quantization import quantize

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.interface import CombineResult, DispatchResult
    from ep_a2a.ops.arguments import CombineInputs, Stages


class RowsBack(NamedTuple):
    """The arguments of a combine, after all checks.

    Attributes:
        rows: the experts' rows, of the shape that dispatch returned. weights: float32 to sum, or None.
        step: what the dispatch was given, with the biases of this combine.
        out: [T, H] to write to, or None.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    step: StepInputs
    out: torch.Tensor | None


class AdapterStep(NamedTuple):
    """What combine needs to know of a dispatch.

    Attributes:
        inputs: as they travelled; `ids` are a copy.
        ids: as they were given. num_writes: how often they had been written to then.
    """

    inputs: StepInputs
    ids: torch.Tensor
    num_writes: int | None


class AdapterOp(BaseOp[StepInputs, AdapterStep, RowsBack]):
    """An op whose rows travel by other means than kernels of this package.

    A subclass moves rows in `_send` and `_bring_back`; whatever can be checked on the host has been checked before.
    The first half of a split call does all of it, and the second returns the result.
    Launch numbers and fields of the config that kernels of this package go by are without effect, but for those that a
    subclass takes; a warning says so once.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    """Names out of KERNEL_FIELDS that the op goes by."""

    adds_biases = False
    """Whether `_bring_back` adds the step's biases to its sums before it rounds them."""

    casts_inside = False
    """Whether `_send` gets tokens before the config's cast."""

    def __init__(self, config: EpDispatchCombineConfig, device: torch.device) -> None:
        super().__init__(config, device, StreamOrder())
        warn_of_fields(type(self).__name__, config, self.takes)

    @abc.abstractmethod
    def _send(self, step: StepInputs) -> DispatchResult:
        """Brings the rows there; the result of dispatch. A step is open only if this returns."""

    @abc.abstractmethod
    def _bring_back(self, given: RowsBack) -> CombineResult:
        """Brings the experts' rows back and adds them; the result of combine."""

    def _check_launch(self, block_num: int, rdma_block_num: int, warp_per_block: int) -> None:
        warn_of_launch(type(self).__name__, block_num, rdma_block_num, warp_per_block)

    def _prepare_dispatch(self, step: StepInputs) -> StepInputs:
        check_dispatch(self.config, self.device, step)
        return step

    def _run_dispatch(
        self, call: StepInputs, stages: Stages, block_num: int = -1, warp_per_block: int = -1
    ) -> OpenStep[AdapterStep]:
        ids, tokens, scales = call.ids, call.tokens, call.scales
        if not self.casts_inside:
            tokens, scales = self._cast(tokens, scales)
        inputs = call._replace(tokens=tokens, scales=scales, ids=ids.clone())
        dispatched = self._send(inputs)
        next_call = "combine" if stages.receive else "dispatch_recv"
        return OpenStep(AdapterStep(inputs, ids, _num_writes(ids)), dispatched, next_call)

    @property
    def _open_inputs(self) -> StepInputs | None:
        """What the dispatch of the open step sent; None between two steps."""
        return None if self._step is None else self._step.facts.inputs

    def _cast(self, tokens: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens and scales as they travel: cast by torch where the config says so."""
        config = self.config
        if config.casts_in_dispatch and tokens.dtype != FP8_DTYPE:
            return quantize(tokens, config.dispatch_quant, config.scale_format)
        if config.casts_in_dispatch and scales is None:
            # Checked before: this rank has no tokens. The other ranks' scales must still find it taking part.
            dtype = torch.uint8 if config.scale_format == ScaleFormat.UE8M0 else torch.float32
            scales = torch.empty(0, config.num_scales, dtype=dtype, device=self.device)
        return tokens, scales if scales is not None and config.num_scales else None

    def _prepare_combine(self, step: OpenStep[AdapterStep], given: CombineInputs) -> RowsBack:
        rows, weights, indices, out, biases = given
        inputs, lead = step.facts.inputs, tuple(step.dispatched.tokens.shape[:-1])
        if isinstance(weights, torch.Tensor) and weights.numel() == 0:
            weights = None
        if isinstance(rows, torch.Tensor) and rows.dim() == 2 and self._is_registered(rows):
            rows = rows[: math.prod(lead)]  # the whole registered buffer may be passed
        check_combine(self.config, self.device, given._replace(rows=rows, weights=weights), lead, inputs.num_tokens)
        self._check_own(indices, step.facts)
        self._check_weights(weights)
        if out is not None:
            check_out(self.config, self.device, out, inputs.num_tokens)
        check_biases(self.config, self.device, biases, inputs.num_tokens)
        rows = rows.view(*lead, rows.shape[-1])
        weights = None if weights is None else weights.view(*lead, -1)
        return RowsBack(rows, weights, inputs._replace(biases=biases), out)

    def _run_combine(
        self,
        step: OpenStep[AdapterStep],
        call: RowsBack,
        stages: Stages,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> CombineResult:
        # whatever comes of it, the step is over
        self._end_step()
        combined = self._bring_back(call)
        for bias in call.step.biases:
            if bias is not None and not self.adds_biases:
                total = combined.tokens[: call.step.num_tokens]
                total.copy_(total.float() + bias)
        return combined

    def _check_own(self, indices: torch.Tensor | None, given: AdapterStep) -> None:
        """Raises ForeignIndicesError unless indices are what dispatch was given, by identity or by value."""
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
        """Raises where combine cannot add weights."""

    def _is_registered(self, rows: torch.Tensor) -> bool:
        """Whether `rows` are the registered combine buffer, of which combine takes the beginning."""
        return False

    def set_max_sms(self, max_sms: int) -> None:
        """Without effect; a warning says so once."""
        warn_of_max_sms(type(self).__name__, max_sms)

    def check(self) -> None:
        """Raises ClosedError after close; all other errors are raised by the call that meets them."""
        if self._closed:
            raise ClosedError("an open op", "a closed one")

    def reset(self) -> None:
        """Makes the op usable again after an unfinished step; to be called on every rank."""
        self.check()
        step = self._step
        self._end_step()
        if step is not None and step.next_call != "combine_recv":
            self._abandon(step)

    def _abandon(self, step: OpenStep[AdapterStep]) -> None:
        """Undoes what an unfinished step has left behind; nothing where rows only pass through."""

    def close(self) -> None:
        """Ends the use of the op; local and idempotent. Its tensors live as long as somebody holds them."""
        self._closed = True


def _num_writes(tensor: torch.Tensor) -> int | None:
    """Changes with every write into the tensor; None for inference tensors, whose writes are not counted."""
    return None if tensor.is_inference() else tensor._version
