"""Keeps calls that exchange data with other ranks out of torch's graphs: those of torch.compile and of autograd."""

import torch

from ep_a2a.memory.guards import Call, guarded

REASON = (
    "ep_a2a exchanges tokens with other ranks by a call that runs between two graphs. Drop fullgraph=True from "
    "torch.compile, or call ep_a2a.autograd, whose operators a graph can hold"
)


def outside_graphs(method: Call) -> Call:
    """Break torch.compile's graph at each call of the method, and guard the call as `guarded` says.

    The call runs as it does without torch.compile. `torch.compiler.disable` breaks graphs, too, by a wrapper that takes
    1.8 us of each call and loads all of torch._dynamo at import. Marks on a function and its code cost nothing.
    """
    call = guarded(method)
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return torch.compiler.disable(call, reason=REASON)  # type: ignore[no-untyped-call,no-any-return]
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    # not this frame, nor any that it calls
    set_code_exec_strategy(call.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return call
