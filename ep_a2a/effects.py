"""Tells torch that operators have side effects: a compiler must not drop, merge or reorder their calls."""

import sys
import weakref
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from ep_a2a.errors import UnsupportedError

try:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op, with_effects
except ImportError as error:
    raise UnsupportedError(
        "a torch whose operators can have side effects", f"torch {torch.__version__}", "Install torch 2.11 or later."
    ) from error

_operators: list[Any] = []
_in_inductor: set[Any] = set()


def register(*names: str) -> None:
    """Give the operators torch.ops.ep_a2a.<name> side effects."""
    for name in names:
        operator = getattr(torch.ops.ep_a2a, name).default
        _register_effectful_op(operator, _EffectType.ORDERED)
        _operators.append(operator)


def save_results(operator: Any) -> None:
    """Make a graph save what the operator's calls return: call it in backward, when the graph has all of forward.

    torch 2.13 repeats such calls, in an activation checkpoint or for an activation_memory_budget below 1, and fails.
    """
    tracing: Any = get_proxy_mode()
    for node in () if tracing is None else tracing.tracer.graph.nodes:
        if node.target is with_effects and node.args[1] is operator:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if not functorch_config.activation_memory_budget:
                # 0 saves inputs only, whatever must be saved
                node.meta["memory_budget"] = 1e-9


def keep_order() -> None:
    """Make inductor keep the order, if it is loaded: call it before inductor can lower an operator.

    torch orders the operators in a graph by tokens. The inductor of torch 2.13 loses that order: it asks for the
    dependencies of an operation by the operation's name, and has stored them by the name of its buffer. Its scheduler
    then goes by sizes of tensors, which differ between ranks.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    # while it is being imported it lacks names
    if lowering is None or not hasattr(lowering, "register_lowering") or not hasattr(lowering, "fallback_handler"):
        return
    for operator in _operators:
        if operator not in _in_inductor:
            _in_inductor.add(operator)
            lowered = _behind_the_last(lowering.fallback_handler(operator, add_to_fallback_set=False))
            lowering.register_lowering(operator, type_promotion_kind=None)(lowered)


def _behind_the_last(lower: Any) -> Any:
    """A lowering whose operations depend on those of the call of an operator before, in the same graph."""

    def lowered(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        graph: Any = V.graph
        num_before = len(graph.operations)
        result = lower(*args, **kwargs)
        last = _last_buffers.get(graph)
        for operation in graph.operations[num_before:]:
            if last is not None:
                graph.additional_star_deps[operation.get_operation_name()].add(last)
        _last_buffers[graph] = graph.operations[num_before].get_name()
        return result

    return lowered


_last_buffers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By inductor's graph, the buffer of the last operator's call."""
