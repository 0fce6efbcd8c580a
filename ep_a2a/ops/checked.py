"""Ops that are no kernels of this package: checks, order of calls and the routing record, written once."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from ep_a2a.config import FP8_DTYPE, ScaleFormat
from ep_a2a.errors import AlternationError, ClosedError, ForeignIndicesError, UnsupportedError
from ep_a2a.memory.streams import is_capturing
from ep_a2a.ops.arguments import NO_BIASES, Biases
from ep_a2a.ops.base import DispatchCombineBase, DispatchResult
from ep_a2a.ops.halves import FirstHalfDoesAll
from ep_a2a.ops.ignored_options import warn_of_fields, warn_of_launch, warn_of_max_sms
from ep_a2a.ops.inputs import check_biases, check_combine, check_dispatch, check_out
from ep_a2a.quantization import quantize

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig


@dataclass(frozen=True)
class StepInputs:
    """What dispatch was given, after all checks, as it travels.

    Attributes:
        tokens: [T, H] of wire_dtype, or of data_type where the backend casts inside dispatch.
        weights: float32 [T, K] or None. scales: [T, S] or None. ids: int32 [T, K], a copy of the op's own.
        max_num_tokens: the step's, equal on all ranks. pad_id: what rows without a token shall carry.
        counts_experts: local_expert_count is asked for.
        biases: what its combine is to add, which is known then.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor
    max_num_tokens: int
    pad_id: int
    counts_experts: bool
    biases: Biases = NO_BIASES

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]


class CheckedDispatchCombineOp(FirstHalfDoesAll, DispatchCombineBase):
    """EpDispatchCombineOp's interface for backends that bring rows there and back by other means.

    A subclass moves rows in `_send` and `_bring_back`; whatever can be checked on the host has been checked before.
    Launch numbers and fields of the config that kernels of this package go by are without effect, but for those that a
    subclass takes; a warning says so once.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    """Names out of KERNEL_FIELDS that the op goes by."""

    adds_biases = False
    """Whether `_bring_back` adds the step's biases to its sums before it rounds them."""

    casts_inside = False
    """Whether `_send` gets tokens before the config's cast."""

    _closed = False
    _inputs: StepInputs | None = None
    _given: tuple[torch.Tensor, int | None] | None = None
    _rows_lead: tuple[int, ...] = ()

    def __init__(self, config: EpDispatchCombineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        warn_of_fields(type(self).__name__, config, self.takes)

    @abc.abstractmethod
    def _send(self, step: StepInputs) -> DispatchResult:
        """Brings the rows there; the result of dispatch. A step is open only if this returns."""

    @abc.abstractmethod
    def _bring_back(
        self, rows: torch.Tensor, weights: torch.Tensor | None, step: StepInputs, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Brings experts' rows, of the shape that dispatch returned, back and adds them; the result of combine."""

    def dispatch(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """Brings each token once to every distinct rank that owns one of its experts; see EpDispatchCombineOp.dispatch.

        Returns:
            (tokens, weights or None, scales or None, indices, total_recv); how rows are arranged, and what is not
            returned, say the backend's capabilities.

        Raises:
            InputError: an argument does not fit; nothing was sent.
            AlternationError: the step before has not been combined.
            ConfigMismatchError, CapacityError, RankTimeoutError: where the backend can find out: ranks disagree, a rank
                would receive too much, a rank did not come.
        """
        self.check()
        self._no_open_half("dispatch")
        warn_of_launch(type(self).__name__, block_num, rdma_block_num, warp_per_block)
        if self._inputs is not None:
            raise AlternationError("combine after dispatch", "dispatch again")
        config = self.config
        limit = config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        check_dispatch(config, self.device, input, weights, scales, indices, limit, pad_id)
        self._streams.follow(self.device)
        tokens, scales = (input, scales) if self.casts_inside else self._cast(input, scales)
        step = StepInputs(tokens, weights, scales, indices.clone(), limit, pad_id, call_local_expert_count)
        result = self._send(step)
        self._inputs, self._given = step, (indices, _version(indices))
        self._rows_lead = tuple(result[0].shape[:-1])
        return result

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

    def combine(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        indices: torch.Tensor | None,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        out: torch.Tensor | None = None,
        bias_0: torch.Tensor | None = None,
        bias_1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums, for each of this rank's tokens, the rows of the ranks it went to; see EpDispatchCombineOp.combine.

        With other projects' libraries biases are added to sums that have been rounded.

        Returns:
            (result [M, H], of which the first T rows are this step's, or `out`; weight sums [M, K] or None).

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was sent, combine can be repeated.
            AlternationError: there is no dispatch to combine.
            RankTimeoutError: where the backend can find out: a rank did not come.
        """
        self.check()
        self._no_open_half("combine")
        warn_of_launch(type(self).__name__, block_num, rdma_block_num, warp_per_block)
        if self._inputs is None:
            raise AlternationError("dispatch before combine", "combine")
        step, lead = self._inputs, self._rows_lead
        if isinstance(weights, torch.Tensor) and weights.numel() == 0:
            weights = None
        if isinstance(input, torch.Tensor) and input.dim() == 2 and self._is_registered(input):
            input = input[: math.prod(lead)]  # noqa: A001  the whole registered buffer may be passed
        check_combine(self.config, self.device, input, weights, indices, lead, step.num_tokens)
        self._check_own(indices, step)
        self._check_weights(weights)
        if out is not None:
            check_out(self.config, self.device, out, step.num_tokens)
        check_biases(self.config, self.device, (bias_0, bias_1), step.num_tokens)
        self._streams.follow(self.device)
        self._inputs = self._given = None
        rows = input.view(*lead, input.shape[-1])
        step = replace(step, biases=(bias_0, bias_1))
        result, sums = self._bring_back(rows, None if weights is None else weights.view(*lead, -1), step, out)
        for bias in step.biases:
            if bias is not None and not self.adds_biases:
                total = result[: step.num_tokens]
                total.copy_(total.float() + bias)
        return result, sums

    def _check_own(self, indices: torch.Tensor | None, step: StepInputs) -> None:
        """Raises ForeignIndicesError unless indices are what dispatch was given, by identity or by value."""
        if indices is None or self._given is None:
            return
        tensor, version = self._given
        if indices.data_ptr() == tensor.data_ptr() and _version(tensor) == _version(indices) == version:
            return
        if is_capturing(self.device):
            raise UnsupportedError(
                "combine's indices to be the tensor given to dispatch, or None, in a capture", "another tensor",
                "Pass that tensor or None.",
            )  # fmt: skip
        if not torch.equal(indices, step.ids):
            raise ForeignIndicesError("combine's indices to be those given to this rank's dispatch", "others")

    def _check_weights(self, weights: torch.Tensor | None) -> None:
        """Raises where combine cannot add weights."""

    def _is_registered(self, rows: torch.Tensor) -> bool:
        """Whether `rows` are the registered combine buffer, of which combine takes the beginning."""
        return False

    def set_max_sms(self, max_sms: int) -> None:
        """Without effect; a warning says so once."""
        warn_of_max_sms(type(self).__name__, max_sms)

    @property
    def has_open_step(self) -> bool:
        """Whether a dispatch has not been combined, or a half not been finished."""
        return self._inputs is not None or self._open_call is not None

    def check(self) -> None:
        """Raises ClosedError after close; all other errors are raised by the call that meets them."""
        if self._closed:
            raise ClosedError("an open op", "a closed one")

    def reset(self) -> None:
        """Makes the op usable again after an unfinished step; to be called on every rank."""
        self.check()
        self._drop_half()
        step, self._inputs, self._given = self._inputs, None, None
        if step is not None:
            self._abandon(step)

    def _abandon(self, step: StepInputs) -> None:
        """Undoes what an unfinished step has left behind; nothing where rows only pass through."""

    def close(self) -> None:
        """Ends the use of the op; local and idempotent. Its tensors live as long as somebody holds them."""
        self._closed = True


def _version(tensor: torch.Tensor) -> int | None:
    """Changes with every write into the tensor; None for inference tensors, whose writes are not counted."""
    return None if tensor.is_inference() else tensor._version
