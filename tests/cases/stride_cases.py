"""Strides: what a caller may hand to an op, laid out in memory in every way that torch knows.

Each tensor is taken, with right results, or refused by ContiguityError with nothing launched.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ep_a2a.errors import ContiguityError
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, built_op, run_step, set_first_epoch
from tests.cases.op_checks import refused

Forms = dict[str, str]
"""How a rank lays out the arguments of a step's calls, by name; one that is not named is as it is."""
ROWS = ("input", "out", "bias_0", "bias_1")
"""Arguments of whole rows, which must start at a multiple of 16 bytes."""
ROLES = (*ROWS, "weights", "scales", "indices")


def _columns_of(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layout: the first columns of rows that are wider by some elements."""

    def layout(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + width)
        return wide[..., : tensor.shape[-1]].copy_(tensor)

    return layout


def _from(num_elements: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layout: contiguous, behind other elements of the same memory."""

    def layout(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.new_zeros(num_elements + tensor.numel())
        return flat[num_elements:].view(tensor.shape).copy_(tensor)

    return layout


def _every_second(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def layout(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] *= 2
        steps = tuple(slice(None, None, 2 if place == dim % tensor.dim() else 1) for place in range(tensor.dim()))
        return tensor.new_zeros(shape)[steps].copy_(tensor)

    return layout


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "one column less than its rows": _columns_of(1),
    "eight columns less than its rows": _columns_of(8),
    "half the columns of its rows": _every_second(-1),
    "every second row": _every_second(0),
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "behind one element": _from(1),
    "behind three elements": _from(3),
    "behind sixteen elements": _from(16),
}


def must_be_refused(role: str, tensor: torch.Tensor) -> bool:
    """What EpDispatchCombineOp promises of layouts, in terms of the tensor alone."""
    if not tensor.is_contiguous():
        return True
    alignment = 16 if role in ROWS else 4 if role == "scales" and tensor.shape[-1] % 4 == 0 else 1
    return bool(tensor.numel()) and tensor.data_ptr() % alignment != 0


def call_laid_out(op: EpDispatchCombineOp, call: Callable[..., Any], forms: Forms, *args: Any, **options: Any) -> Any:
    """A call of the op with every tensor laid out; where one must be refused, once more with that one as it is."""
    given = inspect.signature(call).bind(*args, **options).arguments
    if "out" in forms and "combine" in call.__name__:
        x, indices = given["input"], given["indices"]
        given["out"] = x.new_full((len(indices), x.shape[-1]), torch.nan)
    plain = {role: each for role, each in given.items() if isinstance(each, torch.Tensor)}
    given |= {role: LAYOUTS[forms.get(role, "as it is")](each) for role, each in plain.items()}
    to_refuse = {role for role in plain if must_be_refused(role, given[role])}
    while to_refuse:
        # the error says which tensor it is about; the next one is found when that is mended
        error = str(refused(op, ContiguityError, lambda: call(**given)))
        role = error.removeprefix("expected ").split(" ")[0]
        to_refuse.remove(role)
        given[role] = plain[role].clone()
    return call(**given)


@contextlib.contextmanager
def laid_out(op: EpDispatchCombineOp, forms: Forms) -> Iterator[None]:
    """Within, the op's calls get their tensors laid out."""
    with contextlib.ExitStack() as stack:
        for name in ("dispatch", "dispatch_send", "combine", "combine_send"):
            call = getattr(op, name)
            stack.enter_context(mock.patch.object(op, name, functools.partial(call_laid_out, op, call, forms)))
        yield


def strided_case(context: RankContext, case: Case, forms: list[list[Forms]]) -> None:
    """Every step of the case against the oracle; forms[step][rank]."""
    with built_op(context, case) as op:
        set_first_epoch(op, case, op.arena)
        for number, of_ranks in enumerate(forms):
            with laid_out(op, of_ranks[context.rank]):
                run_step(case, op, number, context.device)
        op.check()
