"""What an engine's adapter calls in each step of a MoE layer: dispatch before the experts, combine after them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ep_a2a.errors import UnsupportedError
from ep_a2a.interface import DispatchResult
from ep_a2a.ops.inputs import in_int32


class Dispatcher:
    """The exchange of one layer, or of one micro-batch of it, on an op that layers may share. Calls alternate.

    Args:
        op: with our interface or MORI's; H is its hidden size.
        options: further arguments of each of the op's dispatches.

    Attributes:
        op: as given.
        pad_id: the id in rows without a token.
        num_tokens: T of the latest dispatch.
    """

    def __init__(self, op: Any, **options: Any) -> None:
        self.op, self._options = op, options
        self.pad_id: int = options.get("pad_id", -1)
        self.num_tokens = 0

    def fitted(
        self, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, weights_on_input: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens, weights and ids for `dispatch`, copied on the current stream where they do not fit.

        Args:
            tokens: [T, H] of the op's data_type, or [T, less than H]: zeros travel in the columns that are missing.
            weights, ids: [T, K], any floating and any integer dtype; ids are global, those out of range dropped slots.
            weights_on_input: multiply tokens by their weight first, and send 1 in its place; K must be 1.
        """
        if weights_on_input:
            if ids.shape[1] != 1:
                raise UnsupportedError("one expert per token where its weight applies to the input", str(ids.shape[1]))
            tokens, weights = tokens * weights.to(tokens.dtype), torch.ones_like(weights)
        return self.padded(tokens).contiguous(), weights.float().contiguous(), in_int32(ids).int().contiguous()

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows [..., H], with zeros in the columns that narrower rows lack."""
        missing = self.op.config.hidden_dim - rows.shape[-1]
        return functional.pad(rows, (0, missing)) if missing > 0 else rows

    def dispatch(
        self, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any
    ) -> DispatchResult:
        """Sends each token to the ranks of its experts, and returns the rows received.

        Args:
            tokens, weights, ids: of `fitted`.
            options: further ones of the op's dispatch; step_tokens, the step's bound or bounds, is equal on all ranks.

        Returns:
            R rows in all, whatever the layout: tokens [R, H] of the op's data_type, or fp8 after a cast, scales [R, S],
            indices and weights [R, K], in layout expert_major of fewer rows: see DispatchResult. Scales by
            columns keep their three dimensions. Views of the op's memory, valid until combine.
        """
        return self._dispatched(self.op.dispatch, tokens, weights, ids, options)

    def dispatch_send(
        self, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any
    ) -> DispatchResult:
        """Begins a dispatch. The result is to be read after `op.dispatch_recv()`."""
        return self._dispatched(self.op.dispatch_send, tokens, weights, ids, options)

    def _dispatched(
        self,
        call: Callable[..., Any],
        tokens: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        options: dict[str, Any],
    ) -> DispatchResult:
        self.num_tokens = len(ids)
        *received, total_recv = call(tokens, weights, None, ids, **self._options, **options)
        # those by columns cannot be flattened without a copy
        rows = [each.flatten(0, -2) if each is not None and each.is_contiguous() else each for each in received]
        return DispatchResult._make([*rows, total_recv])

    def combine(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sums of this rank's tokens [T, H].

        Args:
            rows: [R, H], the experts' weighted sum for each received row, or [R, less than H]: zeros stand for the
                columns that are missing. Ops with MORI's interface take fewer rows, too.
            out: [T, H] or [T, less than H] to write the sums to, without the last columns where it is narrower. None:
                they lie in the op's memory until its next step.
        """
        hidden_dim = self.op.config.hidden_dim
        is_narrow = out is not None and out.shape[-1] < hidden_dim
        wide = out.new_empty(len(out), hidden_dim) if out is not None and is_narrow else out
        # MORI's op has no such argument
        options = {} if wide is None else {"out": wide}
        sums: torch.Tensor = self.op.combine(self.padded(rows), None, None, **options)[0]
        if out is None:
            return sums[: self.num_tokens]
        return out.copy_(sums[:, : out.shape[-1]]) if is_narrow else out

    def combine_send(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins a combine of rows, as of `combine`. Returns a function that ends it and returns the sums."""
        sums: torch.Tensor = self.op.combine_send(self.padded(rows), None, None)[0]

        def receive() -> torch.Tensor:
            self.op.combine_recv()
            return sums[: self.num_tokens]

        return receive
