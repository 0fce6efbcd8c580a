"""Keeps torch.compile out of calls that exchange data with other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

REASON = (
    "ep_a2a exchanges tokens with other ranks, which no graph can hold: the call runs between two graphs. "
    "Drop fullgraph=True from torch.compile, which forbids that"
)

Call = TypeVar("Call", bound="Callable[..., object]")


def outside_graphs(call: Call) -> Call:
    """Break torch.compile's graph at each call of the function, which then runs as it does without torch.compile.

    `torch.compiler.disable` does the same by a wrapper, which takes 1.8 us of each call, compiled or not, and loads all
    of torch._dynamo at import. Marks on the function and its code cost nothing.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return torch.compiler.disable(call, reason=REASON)  # type: ignore[no-untyped-call,no-any-return]
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    # not this frame, nor any that it calls
    set_code_exec_strategy(call.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return call
