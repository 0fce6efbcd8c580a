"""Bodies of the tests of strides: what a caller may hand to an op, laid out in memory in every way that torch knows.

Run on every rank. Each tensor is taken, with right results, or refused by ContiguityError with nothing launched.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ep_a2a.errors import ContiguityError
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, make_inputs, make_op, reference_of, set_first_epoch
from tests.cases.op_checks import raised

Forms = dict[str, str]
"""How a rank lays out each of its tensors in a step, by the tensor's role; a role that is not named is as it is."""
ROW_ROLES = ("input", "rows", "out")
"""Roles of whole rows, which must start at a multiple of 16 bytes."""
ROLES = (*ROW_ROLES, "weights", "scales", "indices", "sent weights", "sent indices")


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
    alignment = 16 if role in ROW_ROLES else 4 if role == "scales" and tensor.shape[-1] % 4 == 0 else 1
    return bool(tensor.numel()) and tensor.data_ptr() % alignment != 0


def call_laid_out(
    op: EpDispatchCombineOp, call: Callable[..., Any], tensors: Mapping[str, torch.Tensor | None], forms: Forms
) -> Any:
    """Calls with every tensor laid out as its form says; where one must be refused, once more with that one cloned."""
    laid_out = {role: None if t is None else LAYOUTS[forms.get(role, "as it is")](t) for role, t in tensors.items()}
    refused = [role for role, t in laid_out.items() if t is not None and must_be_refused(role, t)]
    while refused:
        before, was_open = op.memory.steps.clone(), op.has_open_step
        error = raised(ContiguityError, lambda: call(**laid_out))
        assert op.memory.steps.equal(before), "something was launched"
        assert op.has_open_step == was_open
        # the error says which tensor it is about; the next one is found when that is mended
        role = next((role for role in refused if str(error).startswith(f"expected {role.split()[-1]} ")), None)
        if role is None and "rows" in refused and str(error).startswith("expected input "):
            role = "rows"
        assert role is not None, f"refused were {refused}: {error}"
        laid_out[role] = tensors[role].clone()
        refused.remove(role)
    return call(**laid_out)


def strided_step(case: Case, op: EpDispatchCombineOp, number: int, device: torch.device, forms: Forms) -> None:
    """One step whose tensors this rank lays out as `forms` says, against the oracle."""
    rank = op.config.rank
    everyone = [make_inputs(case, number, r) for r in range(case.world_size)]
    mine = everyone[rank]
    held = {"input": mine.tokens, "weights": mine.weights, "scales": mine.scales, "indices": mine.ids}
    tensors = {role: None if t is None else t.to(device) for role, t in held.items()}
    wishes = {"step_tokens": case.stride(number), "pad_id": case.pad_id}
    if case.in_halves(number, rank, "dispatch"):
        call_laid_out(op, lambda **given: op.dispatch_send(**given, **wishes), tensors, forms)
        got = op.dispatch_recv()
    else:
        got = call_laid_out(op, lambda **given: op.dispatch(**given, **wishes), tensors, forms)
    counts = [each.tokens.shape[0] for each in everyone]
    ids = tensors["indices"]
    step = Step(case, op, number, device, ids, counts, reference_of(case, number, everyone), got)
    step.check_dispatched()
    rows, weights, expected, sums = step.before_combine()
    out = torch.full_like(expected, torch.nan, device=device) if "out" in forms else None
    tensors = {"rows": rows, "sent weights": weights, "sent indices": ids, "out": out}
    splits = case.in_halves(number, rank, "combine")

    def combine(**given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        args = given["rows"], given["sent weights"], given["sent indices"]
        if not splits:
            return op.combine(*args, out=given["out"])
        op.combine_send(*args, out=given["out"])
        return op.combine_recv()

    step.check_combined(call_laid_out(op, combine, tensors, forms), expected, sums)


def strided_case(context: RankContext, case: Case, forms: list[list[Forms]]) -> None:
    """Every step of the case; forms[step][rank]."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        set_first_epoch(op, case, arena)
        for number, of_ranks in enumerate(forms):
            strided_step(case, op, number, context.device, of_ranks[context.rank])
        op.check()
