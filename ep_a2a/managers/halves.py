"""The split calls of an op for backends whose steps cannot be halved: the second half does all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.errors import AlternationError

if TYPE_CHECKING:
    import torch

    from ep_a2a.kernels.base_op import DispatchResult


class SecondHalfDoesAll:
    """Mixin for an op with `dispatch` and `combine`. The first half of a call only keeps its arguments."""

    _first_half: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None

    def dispatch_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        *,
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> None:
        """Keeps the arguments of `dispatch` for `dispatch_recv`; they must not change before it."""
        wishes = {"max_num_tokens": max_num_tokens, "pad_id": pad_id}
        self._keep("dispatch", (input, weights, scales, indices), wishes)

    def dispatch_recv(self) -> DispatchResult:
        """`dispatch` with the arguments of `dispatch_send`; AlternationError without one."""
        result: DispatchResult = self._finish("dispatch")
        return result

    def combine_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> None:
        """Keeps the arguments of `combine` for `combine_recv`; they must not change before it."""
        self._keep("combine", (input, weights, indices), {"out": out})

    def combine_recv(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`combine` with the arguments of `combine_send`; AlternationError without one."""
        result: tuple[torch.Tensor, torch.Tensor | None] = self._finish("combine")
        return result

    def _keep(self, call: str, arguments: tuple[Any, ...], wishes: dict[str, Any]) -> None:
        if self._first_half is not None:
            raise AlternationError(f"{self._first_half[0]}_recv next", f"{call}_send")
        self._first_half = (call, arguments, wishes)

    def _finish(self, call: str) -> Any:
        if self._first_half is None or self._first_half[0] != call:
            raise AlternationError(f"{call}_send before {call}_recv", f"{call}_recv")
        _, arguments, wishes = self._first_half
        self._first_half = None
        return getattr(self, call)(*arguments, **wishes)
