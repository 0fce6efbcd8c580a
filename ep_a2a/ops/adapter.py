"""AdapterOp: checks, casts and the record of the dispatched ids for ops without kernels of this package."""

import abc
import dataclasses
import functools
import logging
import math
from typing import ClassVar

import torch

from ep_a2a.config import FP8_DTYPE, EpDispatchCombineConfig
from ep_a2a.errors import ForeignIndicesError, UnsupportedError
from ep_a2a.interface import CombineResult, DispatchResult
from ep_a2a.memory.guards import StreamOrder, is_capturing, outside_modes
from ep_a2a.ops.arguments import NO_WISH, CombineArguments, LaunchWish, Stages, Step, leading_dims
from ep_a2a.ops.base_op import BaseOp
from ep_a2a.ops.bounds import Bounds
from ep_a2a.ops.inputs import check_apart, check_combine, check_dispatch, check_token_rows, travelling_scales
from ep_a2a.quantization import quantize

logger = logging.getLogger(__name__)

KERNEL_FIELDS = (
    "launch",
    "max_sms",
    "timeout_secs",
    "first_timeout_secs",
    "mask_after_secs",
    "flagged_max_tokens",
    "expert_alignment",
    "column_major_scales",
    "compiled_calls",
    "chunk_tokens",
    "ring_chunks",
    "internode_transport",
)
"""Fields of the config that only this package's kernels read."""


class AdapterOp(BaseOp):
    """An op whose rows are moved by collectives or by another project's library.

    A subclass moves rows in `_send` and `_bring_back`, after all checks on the host. The first half of a split call
    does the whole call; the second half returns the result. Launch numbers, and config fields of this package's kernels
    that are not in `takes`, have no effect; a warning says so once.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    """Names in KERNEL_FIELDS that have an effect on this op."""

    adds_biases = False
    """Whether `_bring_back` adds the biases, before it rounds the sums; else they are added to rounded sums."""

    takes_bounds_by_rank = False
    """Whether `_send` goes by bounds that differ between ranks (Capabilities.packs_rows)."""

    casts_inside = False
    """Whether `_send` casts the tokens itself."""

    def __init__(self, config: EpDispatchCombineConfig, device: torch.device) -> None:
        super().__init__(config, device, StreamOrder())
        _warn_of_fields(type(self).__name__, config, self.takes)
        int32 = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self._total_recv, self._recv_counts = int32(1), int32(config.world_size)
        self._local_expert_count = int32(config.num_local_experts)

    @abc.abstractmethod
    def _send(self, step: Step) -> DispatchResult:
        """Move the rows to the experts' ranks and return dispatch's result. The step has its own copy of the ids."""

    @abc.abstractmethod
    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        """Move the experts' rows, in the shape of dispatch's tokens, back, add them, and return combine's result."""

    def _checked_wish(self, block_num: int, warp_per_block: int) -> LaunchWish:
        warn_once(type(self).__name__, ("block_num, rdma_block_num and warp_per_block of calls",))
        return NO_WISH

    def _prepare_dispatch(self, step: Step) -> None:
        check_dispatch(self.config, self.device, step)
        if not (self.takes_bounds_by_rank or isinstance(step.step_tokens, int)):
            raise UnsupportedError(
                "step_tokens as one integer",
                f"{step.step_tokens}: another library places the rows of {type(self).__name__}",
                "Pass max(step_tokens), or use the backend 'ep_a2a', which packs rows.",
            )
        step.bounds = Bounds.of(self.config, step.step_tokens)
        step.num_tokens = step.tokens.shape[0]

    def _run_dispatch(self, step: Step, stages: Stages, wish: LaunchWish) -> None:
        if not self.casts_inside:
            self._cast(step)
        step.given_ids, step.ids = (step.ids, _num_writes(step.ids)), step.ids.clone()
        step.dispatched = self._send(step)

    def _cast(self, step: Step) -> None:
        """Put the tokens and scales to send into the step; torch casts them where the config asks for a cast."""
        config = self.config
        if config.casts_in_dispatch and step.tokens.dtype != FP8_DTYPE:
            step.tokens, made = quantize(step.tokens, config.dispatch_quant, config.scale_format, step.scales)
            step.scales = None if config.takes_scale else made
        else:
            step.scales = travelling_scales(config, step.tokens, step.scales)

    def _prepare_combine(self, step: Step, args: CombineArguments) -> None:
        lead, rows = step.lead, args.rows
        # beside no rows they are those of all rows, which other ranks pass, too
        if isinstance(args.weights, torch.Tensor) and args.weights.numel() == 0 and 0 not in lead:
            args.weights = None
        if isinstance(rows, torch.Tensor) and rows.dim() == 2 and self._is_registered(rows):
            args.rows = rows[: math.prod(lead)]  # the whole registered buffer may be passed
        check_combine(self.config, self.device, args, lead, step.num_tokens)
        if args.ids is not None:
            self._check_own(args.ids, step)
        self._check_weights(args.weights)
        bias_0, bias_1 = args.biases
        check_token_rows(self.config, self.device, step.num_tokens, out=args.out, bias_0=bias_0, bias_1=bias_1)
        if args.out is not None:
            check_apart("out", args.out, args.rows, "the rows to be combined")
        args.rows = args.rows.view(*lead, args.rows.shape[-1])
        if args.weights is not None:
            args.weights = args.weights.view(*lead, args.weights.shape[-1])

    def _run_combine(self, step: Step, args: CombineArguments, stages: Stages, wish: LaunchWish) -> CombineResult:
        # whatever comes of it, the step is over
        self._end_step()
        # a bias may be `out`, or the result of an earlier combine, whose memory a library may use again
        biases = [] if self.adds_biases else [bias.clone() for bias in args.biases if bias is not None]
        combined = self._bring_back(step, args)
        for bias in biases:
            total = combined.tokens[: step.num_tokens]
            total.copy_(total.float() + bias)
        return combined

    def _check_own(self, indices: torch.Tensor, step: Step) -> None:
        """Raise ForeignIndicesError unless `indices` is the dispatched tensor, or equal to it."""
        given, num_writes = step.given_ids
        if indices.data_ptr() == given.data_ptr() and _num_writes(given) == _num_writes(indices) == num_writes:
            return
        if is_capturing(self.device):
            raise UnsupportedError(
                "combine's indices to be the tensor given to dispatch, or None, in a capture",
                "another tensor",
                "Pass that tensor or None.",
            )
        if not torch.equal(indices, step.ids):
            raise ForeignIndicesError("combine's indices to be those given to this rank's dispatch", "others")

    def _check_weights(self, weights: torch.Tensor | None) -> None:
        """Raise if combine cannot sum weights."""

    @property
    def recv_counts(self) -> torch.Tensor:
        """[W] int32, the rows received from each source in the last dispatch."""
        return self._recv_counts

    @property
    def local_expert_count(self) -> torch.Tensor:
        """[E] int32, the received slots per expert of this rank, after dispatch(call_local_expert_count=True)."""
        return self._local_expert_count

    @functools.cached_property
    @outside_modes()
    def _combine_input(self) -> torch.Tensor:
        lead = leading_dims(self.config, self.config.max_num_inp_token_per_rank).rows
        shape = (math.prod(lead), self.config.hidden_dim)
        return torch.empty(shape, dtype=self.config.combined_dtype, device=self.device)

    def _is_registered(self, rows: torch.Tensor) -> bool:
        """Whether `rows` is the registered combine buffer; combine then takes its first rows."""
        return "_combine_input" in self.__dict__ and rows.data_ptr() == self._combine_input.data_ptr()

    def set_max_sms(self, max_sms: int, *, shares_sm: bool = False) -> None:
        """Without effect, which a warning says once."""
        if max_sms or shares_sm:
            warn_once(type(self).__name__, ("set_max_sms",))

    def warmup_split(self) -> None:
        """Do nothing: whole calls have compiled all that halves need."""

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """Raise UnsupportedError: another library chooses the launches."""
        raise UnsupportedError(
            "an op that chooses launches",
            f"{type(self).__name__}, whose launches another library chooses",
            "Use the backend 'ep_a2a'.",
        )

    def record_spans(self) -> None:
        """Raise UnsupportedError: kernels of another project note no times."""
        raise UnsupportedError(
            "an op whose kernels can note times", f"{type(self).__name__}, which has none", "Trace an op of one node."
        )

    def active_ranks(self) -> tuple[int, ...]:
        """All ranks: nobody goes on without a lost one."""
        return tuple(range(self.config.world_size))

    def step_fault(self) -> torch.Tensor:
        """A bool [1] on the device, False: no rank is ever masked."""
        return torch.zeros(1, dtype=torch.bool, device=self.device)

    def check(self) -> None:
        """Raise ClosedError after close. All other errors are raised by the call that causes them."""

    @outside_modes()
    def reset(self) -> None:
        """Make the op usable again after an unfinished step. Must be called on every rank."""
        self.check()
        step = self.open_step
        self._end_step()
        if step is not None and step.next_call != "combine_recv":
            self._abandon(step)

    def _abandon(self, step: Step) -> None:
        """Undo the effects of an unfinished step; a subclass without state has none."""


def _warn_of_fields(op_name: str, config: EpDispatchCombineConfig, taken: frozenset[str]) -> None:
    """Warn of fields in KERNEL_FIELDS that differ from their default and are not in `taken`."""
    fields = (each for each in dataclasses.fields(config) if each.name in KERNEL_FIELDS and each.name not in taken)
    changed = tuple(each.name for each in fields if getattr(config, each.name) != each.default)
    if changed:
        warn_once(op_name, changed)


@functools.cache
def warn_once(op_name: str, names: tuple[str, ...]) -> None:
    """Warn once per process: every layer and every step passes the same arguments."""
    text = "without effect on %s: %s; the backend 'ep_a2a' goes by them"
    logger.warning(text, op_name, ", ".join(names), stacklevel=2)


def _num_writes(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes to the tensor; None for inference tensors, whose writes torch does not count."""
    return None if tensor.is_inference() else tensor._version
