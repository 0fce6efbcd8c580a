"""The split calls of an op for backends whose steps cannot be halved: the first half does all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.errors import AlternationError

if TYPE_CHECKING:
    import torch

    from ep_a2a.ops.base import DispatchResult


class FirstHalfDoesAll:
    """Mixin for an op with `dispatch` and `combine`. The second half of a call only gives out the result.

    As with the native op, inputs belong to the caller again after the first half, and outputs are valid from the
    second half on. An error of the whole call is raised by the first half, after which the call can be repeated.
    """

    _open_call: str | None = None
    _result: Any = None

    def dispatch_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        *,
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """`dispatch`, the result of which `dispatch_recv` returns as well."""
        result: DispatchResult = self._do_all(
            "dispatch", input, weights, scales, indices, max_num_tokens=max_num_tokens, pad_id=pad_id
        )
        return result

    def dispatch_recv(self) -> DispatchResult:
        """The result of `dispatch_send`; AlternationError without one."""
        result: DispatchResult = self._give_out("dispatch")
        return result

    def combine_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        bias_0: torch.Tensor | None = None,
        bias_1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`combine`, the result of which `combine_recv` returns as well."""
        result: tuple[torch.Tensor, torch.Tensor | None] = self._do_all(
            "combine", input, weights, indices, out=out, bias_0=bias_0, bias_1=bias_1
        )
        return result

    def combine_recv(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result of `combine_send`; AlternationError without one."""
        result: tuple[torch.Tensor, torch.Tensor | None] = self._give_out("combine")
        return result

    def _no_open_half(self, call: str) -> None:
        """To be called first by `dispatch` and `combine`."""
        if self._open_call is not None:
            raise AlternationError(f"{self._open_call}_recv next", call)

    def _drop_half(self) -> None:
        """Forgets an unfinished call, as `reset` does."""
        self._open_call = self._result = None

    def _do_all(self, call: str, *arguments: Any, **wishes: Any) -> Any:
        self._no_open_half(f"{call}_send")
        self._result = getattr(self, call)(*arguments, **wishes)
        self._open_call = call
        return self._result

    def _give_out(self, call: str) -> Any:
        if self._open_call != call:
            raise AlternationError(f"{call}_send before {call}_recv", f"{call}_recv")
        result = self._result
        self._drop_half()
        return result
