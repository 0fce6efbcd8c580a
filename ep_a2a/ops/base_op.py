"""BaseOp: the public calls of every op, and the order in which they may be made.

A subclass checks the arguments of a call (`_prepare_dispatch`, `_prepare_combine`) and moves the rows (`_run_dispatch`,
`_run_combine`). `ep_a2a.interface.DispatchCombineOp` is the contract for callers.
"""
# ruff: noqa: B027  methods that do nothing suit an op whose launches another library makes

from __future__ import annotations

import abc
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import AlternationError, ConfigError, EpA2AError, InputError, StateError, max_tokens_name
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import CombineResult, DispatchResult
from ep_a2a.memory.guards import OwnProcess, StreamOrder, become_closed
from ep_a2a.ops.arguments import NO_WISH, SEND, WHOLE, CombineArguments, LaunchWish, Stages, Step
from ep_a2a.ops.bounds import StepTokens, num_rows

T = TypeVar("T")

OPS: weakref.WeakValueDictionary[int, BaseOp] = weakref.WeakValueDictionary()
"""The process's ops by number, as operators of torch name them."""
_numbers = itertools.count()
OWN_LAUNCH = (-1, -1, -1)
"""Launch numbers of a call that lets the op choose them."""


class BaseOp(abc.ABC):
    """Base of all ops. As a context manager it closes the op at the end.

    Args:
        config: shapes and choices.
        device: where the op's tensors live.
        streams: makes each call wait for the one before, on whichever stream that was.

    Attributes:
        open_step: the step between its calls; None where a dispatch comes next.
    """

    def __init__(self, config: EpDispatchCombineConfig, device: torch.device, streams: StreamOrder) -> None:
        self.config = config
        self.device = device
        self.number = next(_numbers)
        OPS[self.number] = self
        self.streams = streams
        self.open_step: Step | None = None
        self._left: tuple[torch.Tensor, Step] | None = None
        self._process = OwnProcess()
        # the call that launches, and its thread; the name stays behind if an exception of another kind ends the call
        self._launching: str | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._max_tokens_name = max_tokens_name()
        for name, value in vars(type(config)).items():
            if isinstance(value, functools.cached_property):
                # to compute one takes a lock (Python 3.11), which a graph of torch.compile cannot hold
                getattr(config, name)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @abc.abstractmethod
    def check(self) -> None:
        """Raise the first error that has been recorded; never blocks. Every call begins with it.

        Raises:
            ClosedError: the op has been closed.
        """

    @abc.abstractmethod
    def _checked_wish(self, block_num: int, warp_per_block: int) -> LaunchWish:
        """The launch numbers of a call. Raise if they cannot be used; warn if they have no effect."""

    @abc.abstractmethod
    def _prepare_dispatch(self, step: Step) -> None:
        """Check the arguments of a dispatch, and complete the step; launch nothing."""

    @abc.abstractmethod
    def _run_dispatch(self, step: Step, stages: Stages, wish: LaunchWish) -> None:
        """Launch a dispatch, or its first half."""

    def _bound_given(self, step_tokens: StepTokens | None, max_num_tokens: StepTokens | None) -> StepTokens:
        """The bound of a step: by its name, by its older name, or M."""
        if max_num_tokens is not None:
            if step_tokens is not None:
                raise InputError("step_tokens, or its older name max_num_tokens", "both", "Pass step_tokens.")
            return max_num_tokens
        return self.config.max_num_inp_token_per_rank if step_tokens is None else step_tokens

    def _finish_dispatch(self, step: Step) -> None:
        """Launch the second half of a dispatch, where the first has not done all of it."""

    @abc.abstractmethod
    def _prepare_combine(self, step: Step, args: CombineArguments) -> None:
        """Check the arguments of a combine of the open step, and complete them; launch nothing of the combine."""

    @abc.abstractmethod
    def _run_combine(self, step: Step, args: CombineArguments, stages: Stages, wish: LaunchWish) -> CombineResult:
        """Launch a combine, or its first half."""

    def _finish_combine(self, step: Step) -> None:
        """Launch the second half of a combine, where the first has not done all of it."""

    @outside_graphs
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
        step_tokens: StepTokens | None = None,
        max_num_tokens: StepTokens | None = None,
        pad_id: int = -1,
        tag: int = 0,
    ) -> DispatchResult:
        """Send each token once to every distinct rank that owns one of its experts; return the rows received.

        `DispatchCombineOp.dispatch` in ep_a2a/interface.py has the arguments, results and errors.
        """
        wish = NO_WISH
        if (block_num, rdma_block_num, warp_per_block) != OWN_LAUNCH:
            # before the step begins: a call that is refused must not hold the memory against other ops
            wish = self._checked_wish(block_num, warp_per_block)
        step_tokens = self._bound_given(step_tokens, max_num_tokens)
        step = Step(input, weights, scales, indices, step_tokens, pad_id, call_local_expert_count, tag)
        return self._dispatch("dispatch", step, WHOLE, wish)

    @outside_graphs
    def dispatch_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        *,
        step_tokens: StepTokens | None = None,
        max_num_tokens: StepTokens | None = None,
        pad_id: int = -1,
        tag: int = 0,
    ) -> DispatchResult:
        """Begin a dispatch: send the tokens, and return the tensors that dispatch_recv fills.

        In layout compact a bulk dispatch waits for all ranks' counts; any other waits for no rank. Ranks may mix
        whole and split calls. Make a split call once, or call `warmup_split`, before a graph captures one.
        `DispatchCombineOp.dispatch` in ep_a2a/interface.py has the arguments and errors.
        """
        step_tokens = self._bound_given(step_tokens, max_num_tokens)
        step = Step(input, weights, scales, indices, step_tokens, pad_id, False, tag)
        return self._dispatch("dispatch_send", step, SEND)

    @outside_graphs
    def dispatch_recv(self) -> DispatchResult:
        """End a dispatch: wait on the GPU for the rows of all ranks, and return them.

        Raises:
            AlternationError: there is no `dispatch_send` to end.
        """
        step = self._expect("dispatch_recv", "dispatch_recv")
        self._launch("dispatch_recv", self._finish_dispatch, step)
        step.next_call, self._launching = "combine", None
        return step.dispatched

    @outside_graphs
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
    ) -> CombineResult:
        """Add, for each of this rank's tokens, the rows of the distinct ranks that it went to, in float32.

        `DispatchCombineOp.combine` in ep_a2a/interface.py has the arguments, results and errors.
        """
        wish = NO_WISH
        if (block_num, rdma_block_num, warp_per_block) != OWN_LAUNCH:
            wish = self._checked_wish(block_num, warp_per_block)
        args = CombineArguments(input, weights, indices, out, [bias_0, bias_1])
        return self._combine("combine", args, WHOLE, wish)

    @outside_graphs
    def combine_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        bias_0: torch.Tensor | None = None,
        bias_1: torch.Tensor | None = None,
    ) -> CombineResult:
        """Begin a combine: send the rows back, and return the tensors that combine_recv fills. It waits for no rank.

        `DispatchCombineOp.combine_send` in ep_a2a/interface.py says which arguments may be overwritten when.
        """
        return self._combine("combine_send", CombineArguments(input, weights, indices, out, [bias_0, bias_1]), SEND)

    @outside_graphs
    def combine_recv(self) -> CombineResult:
        """End a combine: wait on the GPU for this rank's rows, add them, and return the sums.

        Raises:
            AlternationError: there is no `combine_send` to end.
        """
        step = self._expect("combine_recv", "combine_recv")
        self._launch("combine_recv", self._finish_combine, step)
        self._end_step()
        return step.combined

    def _dispatch(self, name: str, step: Step, stages: Stages, wish: LaunchWish = NO_WISH) -> DispatchResult:
        """Check and launch a dispatch, or its first half; open the step."""
        self._require_ready()
        self.end_left_step()
        if self.open_step is not None:
            raise AlternationError(f"{self.open_step.next_call} next", name)
        self._prepare_dispatch(step)
        self._launch(name, self._run_dispatch, step, stages, wish)
        if not stages.receive:
            step.next_call = "dispatch_recv"
        self.open_step, self._launching = step, None
        return step.dispatched

    def _combine(self, name: str, args: CombineArguments, stages: Stages, wish: LaunchWish = NO_WISH) -> CombineResult:
        """Check and launch a combine, which ends the step, or its first half."""
        step = self._expect("combine", name)
        self._prepare_combine(step, args)
        combined = self._launch(name, self._run_combine, step, args, stages, wish)
        if stages.receive:
            self._end_step()
        else:
            step.next_call, step.combined = "combine_recv", combined
            self.open_step, self._launching = step, None
        return combined

    def _launch(self, name: str, run: Callable[..., T], *args: Any) -> T:
        """Do the launches of a call behind those of the one before. The caller clears `_launching` with the step."""
        self.streams.follow(self.device)
        try:
            self._launching, self._thread = name, threading.current_thread()
            return run(*args)
        except EpA2AError:
            self._launching = None
            raise
        finally:
            self._thread = None

    def _require_ready(self) -> None:
        """Raise if no call may be made: in a forked child, in or after a call that has not ended, after an error."""
        self._process.require("the op")
        if self._launching:
            raise self._error_of_unfinished_call(self._launching, self._thread)
        self.check()

    def _error_of_unfinished_call(self, name: str, thread: threading.Thread | None) -> StateError:
        if thread is not None:
            return StateError(
                "one thread at a time to call an op",
                f"a {name} that thread {thread.name!r} is in",
                "Give each thread an op of its own: get_handle(kwargs, index).",
            )
        return StateError(
            "every call to end",
            f"a {name} that Ctrl-C or an exception has interrupted, so that its step is torn",
            "op.reset() on every rank makes the op usable again.",
        )

    def _expect(self, next_call: str, name: str) -> Step:
        """Return the open step; raise AlternationError unless it waits for `next_call`."""
        self._require_ready()
        step = self.open_step
        if step is None or step.next_call != next_call:
            raise AlternationError(f"{'dispatch' if step is None else step.next_call} next", name)
        return step

    def _end_step(self) -> None:
        """Close the step, so that the next call is dispatch."""
        self.open_step = self._left = None
        self._launching = None

    def leave_step(self, token: torch.Tensor) -> None:
        """Close the open step for callers: `take_up_step` opens it again, and any dispatch in its memory ends it first.

        Args:
            token: what tells the step from others, by its address: equal calls on all ranks have one each.
        """
        assert self.open_step is not None
        self._left, self.open_step = (token, self.open_step), None

    def take_up_step(self, token: torch.Tensor) -> bool:
        """Whether the step with this token was left, and is open now."""
        left = self._left
        # the token that is held keeps its address to itself
        if left is None or left[0].data_ptr() != token.data_ptr():
            return False
        self.open_step, self._left = left[1], None
        return True

    def end_left_step(self) -> bool:
        """Combine a step that was left; nobody needs the sums. Returns whether there was one: equal on all ranks."""
        if self._left is None:
            return False
        self.open_step, self._left = self._left[1], None
        tokens, dtype = self.open_step.dispatched.tokens, self.config.combined_dtype
        out = tokens.new_empty(self.open_step.num_tokens, tokens.shape[-1], dtype=dtype)
        self.combine(tokens.new_empty(tokens.shape, dtype=dtype), None, None, out=out)
        return True

    @property
    def has_open_step(self) -> bool:
        """Whether a step has begun and not ended; also one whose call was interrupted."""
        return self._launching is not None or self.open_step is not None

    def num_rows(self, step_tokens: StepTokens) -> int:
        """R: the rows that dispatch returns for this step_tokens."""
        return num_rows(self.config, step_tokens)

    def close(self) -> None:
        """End the use of the op; local, and a second call does nothing.

        Every other method and property but `closed`, `config` and `device` raises ClosedError from then on.
        """
        if not self._closed:
            self._closed = True
            if self._process.is_current:
                self._close()
            become_closed(self, "op", tells=("reset",))

    def _close(self) -> None:
        """Free what the op holds. Called once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abc.abstractmethod
    def _combine_input(self) -> torch.Tensor:
        """The registered combine buffer."""

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Memory for combine's input: [R, H] of combine_dtype, in expert_major [E * R, H], with R for M tokens.

        The first call allocates it. It saves no copy: combine sends rows from any memory.
        """
        self._check_buffer_request(dtype, hidden_dim)
        return self._combine_input

    def _check_buffer_request(self, dtype: torch.dtype, hidden_dim: int) -> None:
        if dtype != self.config.combined_dtype or hidden_dim not in (-1, self.config.hidden_dim):
            raise ConfigError(
                f"{self.config.combined_dtype} and hidden size {self.config.hidden_dim}", f"{dtype} and {hidden_dim}"
            )
