"""What an engine's adapter calls in each step of a MoE layer: dispatch before the experts, combine after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.interface import DispatchResult


class Inputs(NamedTuple):
    """The first arguments of an op's dispatch."""

    tokens: torch.Tensor
    weights: torch.Tensor
    scales: None
    ids: torch.Tensor


@dataclass(frozen=True)
class Received:
    """The rows that a dispatch brings, R in all, in the op's memory: valid until combine.

    Properties are views; with words they are copies, made on the current stream.

    Attributes:
        result: of the op's dispatch.
        num_words: int32 words of each row.
    """

    result: DispatchResult
    num_words: int = 0

    @property
    def rows(self) -> torch.Tensor:
        """[R, H] of the op's data_type, or fp8 after a cast. Rows without a token hold arbitrary values."""
        return self.result.tokens.flatten(0, -2)

    @property
    def scales(self) -> torch.Tensor | None:
        """[R, S], those of a cast in dispatch."""
        return None if self.result.scales is None else self.result.scales.flatten(0, -2)

    @property
    def ids(self) -> torch.Tensor:
        """[R, K] int32 global expert ids; pad_id in rows without a token."""
        return self._without_words(self.result.indices)

    @property
    def weights(self) -> torch.Tensor:
        """[R, K] float32 router weights."""
        assert self.result.weights is not None
        return self._without_words(self.result.weights)

    @property
    def words(self) -> torch.Tensor:
        """[R, num_words] int32; -1 in rows without a token."""
        assert self.result.weights is not None
        slots = slice(-self.num_words, None)
        words = self.result.weights[..., slots].contiguous().view(torch.int32)
        # the ids of words are dropped slots, those of rows without a token are not
        return torch.where(self.result.indices[..., slots] < 0, words, -1).flatten(0, -2)

    def _without_words(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.flatten(0, -2)[:, : slots.shape[-1] - self.num_words].contiguous()


class Dispatcher:
    """The exchange of one layer, or of one micro-batch of it, on an op that layers may share. Calls alternate.

    Args:
        op: of layout rank_major or compact, with our interface or MORI's; H is its hidden size.
        num_words: int32 words that travel with each token: the op has room for so many more experts per token.
        options: further arguments of each of the op's dispatches; with words, pad_id must be an expert.

    Attributes:
        op, num_words: as given.
        num_tokens: T of the latest dispatch.
    """

    def __init__(self, op: Any, *, num_words: int = 0, **options: Any) -> None:
        self.op, self.num_words, self._options = op, num_words, options
        self.num_tokens = 0

    def inputs(
        self,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        words: torch.Tensor | None = None,
        *,
        weights_on_input: bool = False,
    ) -> Inputs:
        """Returns the arguments of `dispatch`, copied on the current stream where they do not fit as they are.

        Args:
            tokens: [T, H] of the op's data_type, or [T, less than H]: zeros travel in the columns that are missing.
            weights, ids: [T, K], any floating and any integer dtype; ids are global, those below 0 dropped slots.
            words: int32 [T, num_words], or None where there are none.
            weights_on_input: multiply tokens by their weight first; K must be 1.
        """
        if weights_on_input:
            if ids.shape[1] != 1:
                raise UnsupportedError("one expert per token where its weight applies to the input", str(ids.shape[1]))
            tokens = tokens * weights.to(tokens.dtype)
        weights, ids = weights.float(), ids.int()
        if words is not None:
            # as the weights of slots that no expert has
            weights = torch.cat([weights, words.view(torch.float32)], 1)
            ids = torch.cat([ids, torch.full_like(words, -1)], 1)
        return Inputs(self.padded(tokens).contiguous(), weights.contiguous(), None, ids.contiguous())

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows [..., H], with zeros in the columns that narrower rows lack."""
        missing = self.op.config.hidden_dim - rows.shape[-1]
        return functional.pad(rows, (0, missing)) if missing > 0 else rows

    def dispatch(self, inputs: Inputs, **options: Any) -> Received:
        """Sends each token to the ranks of its experts, and returns the rows received.

        Args:
            inputs: of the method `inputs`.
            options: further ones of the op's dispatch; max_num_tokens, the step's bound, is equal on all ranks.
        """
        return self._dispatched(self.op.dispatch, inputs, options)

    def dispatch_send(self, inputs: Inputs, **options: Any) -> Received:
        """Begins a dispatch. The result is to be read after `op.dispatch_recv()`."""
        return self._dispatched(self.op.dispatch_send, inputs, options)

    def _dispatched(self, call: Callable[..., DispatchResult], inputs: Inputs, options: dict[str, Any]) -> Received:
        self.num_tokens = len(inputs.ids)
        return Received(call(*inputs, **self._options, **options), self.num_words)

    def combine(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sums of this rank's tokens [T, H].

        Args:
            rows: [R, H], the experts' weighted sum for each received row, or [R, less than H]: zeros stand for the
                columns that are missing. Ops with MORI's interface take fewer rows, too.
            out: [T, H] or [T, less than H] to write the sums to, without the last columns where it is narrower. None:
                they lie in the op's memory until its next step.
        """
        return self._combined(self.op.combine, rows, out)()

    def combine_send(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
        """Begins a combine. Returns a function that ends it and returns the sums; arguments are those of `combine`."""
        finish = self._combined(self.op.combine_send, rows, out)

        def receive() -> torch.Tensor:
            self.op.combine_recv()
            return finish()

        return receive

    def _combined(
        self, call: Callable[..., Any], rows: torch.Tensor, out: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        hidden_dim = self.op.config.hidden_dim
        is_narrow = out is not None and out.shape[-1] < hidden_dim
        wide = out.new_empty(len(out), hidden_dim) if out is not None and is_narrow else out
        sums: torch.Tensor = call(self.padded(rows), None, None, **({} if wide is None else {"out": wide}))[0]

        def finish() -> torch.Tensor:
            if out is None:
                return sums[: self.num_tokens]
            return out.copy_(sums[:, : out.shape[-1]]) if is_narrow else out

        return finish
