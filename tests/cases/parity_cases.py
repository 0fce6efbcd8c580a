"""One body for every backend: the same inputs, the same oracle, the same result, whatever lies between.

Rows say where they come from, experts multiply by powers of two, and all numbers are so small that bfloat16 holds every
sum of them exactly: the result does not depend on who applies the weights, or in which order rows come and are added.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.capabilities import Capabilities, problems
from ep_a2a.managers.registry import available_backends, create_manager, manager_type
from ep_a2a.routing import destination_mask
from ep_a2a.testing import RankContext
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case

TOPK, EXPERTS_PER_RANK, MAX_TOKENS = 2, 4, 8
LAYOUTS = ("compact", "rank_major", "expert_major")
STEPS: tuple[tuple[tuple[int, ...], int | None], ...] = (((5, 0, 8, 3), None), ((0, 0, 0, 0), None), ((2, 4, 1, 4), 4))
"""Tokens of each rank, and step_tokens."""
SOURCE, TOKEN = 0, 1
"""Elements of a row that say where it comes from."""


@dataclass(frozen=True)
class Batch:
    """One rank's inputs of a step.

    Attributes:
        x: bfloat16 [T, H]: source rank, token, and integers from -4 to 4. weights: [T, K], 0.5 or 1. ids: int32 [T, K].
    """

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def reason_against(name: str, layout: str, device_type: str) -> str | None:
    """Why a backend does not take part here, by its capabilities; None where it does."""
    manager = manager_type(name)
    if layout not in manager.capabilities.layouts:
        return f"{name}: layouts {', '.join(manager.capabilities.layouts)}"
    found = problems(manager, device_type)
    return f"{name}: {'; '.join(found)}" if found else None


def pairs() -> list[tuple[str, str]]:
    """All backends, each with the layouts that it declares."""
    return [
        (name, layout)
        for name in available_backends()
        for layout in LAYOUTS
        if (manager := manager_type(name)) is not None and layout in manager.capabilities.layouts
    ]


def batch(step: int, rank: int, world_size: int, hidden_dim: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num_tokens, num_experts = STEPS[step][0][rank % 4], EXPERTS_PER_RANK * world_size
    x = torch.randint(-4, 5, (num_tokens, hidden_dim), generator=generator).to(torch.bfloat16)
    x[:, SOURCE], x[:, TOKEN] = rank, torch.arange(num_tokens)
    weights = torch.randint(1, 3, (num_tokens, TOPK), generator=generator) / 2
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(TOPK).indices.to(torch.int32)
    ids[1::2, 0] = -1
    return Batch(x, weights, ids)


def factor(experts: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies by."""
    return 1.0 + experts % 2


def layer(batch: Batch, num_experts: int) -> torch.Tensor:
    """The oracle, float32 [T, H]: each token times its experts' factors and its weights."""
    valid = (batch.ids >= 0) & (batch.ids < num_experts)
    return batch.x.float() * (valid * batch.weights * factor(batch.ids)).sum(1, keepdim=True)


def handle_kwargs(context: RankContext, layout: str, hidden_dim: int) -> dict[str, Any]:
    num_experts = EXPERTS_PER_RANK * context.world_size
    case = Case(context.world_size, hidden_dim, TOPK, num_experts, MAX_TOKENS, layout=layout)
    return kwargs_of(case, context.rank)


def run_backend(context: RankContext, name: str, layout: str, hidden_dim: int) -> None:
    """Steps of uneven and no tokens on one backend, dispatch and result against the oracle."""
    run_manager(context, create_manager(name, context.group), layout, hidden_dim)


def run_manager(
    context: RankContext,
    manager: All2AllManagerBase,
    layout: str,
    hidden_dim: int,
    num_steps: int = len(STEPS),
    **options: Any,
) -> None:
    """As `run_backend`, on a manager that has been made, with more handle kwargs; closes it."""
    manager.device = context.device
    num_experts = EXPERTS_PER_RANK * context.world_size
    op = manager.get_handle({**handle_kwargs(context, layout, hidden_dim), **options})
    for step, (_, step_tokens) in enumerate(STEPS[:num_steps]):
        everyone = [batch(step, rank, context.world_size, hidden_dim) for rank in range(context.world_size)]
        mine = everyone[context.rank]
        ids = mine.ids.to(context.device)
        got = op.dispatch(
            mine.x.to(context.device),
            mine.weights.to(context.device),
            None,
            ids,
            call_local_expert_count=True,
            step_tokens=step_tokens,
        )
        check_dispatched(manager.capabilities, op, got, everyone)
        # padding holds anything: what experts make of it must not matter
        rows = torch.full_like(got[0], torch.nan)
        rows[valid_rows(op, got[0], got[3])] = outputs(op, got)
        out = torch.ones_like(mine.x, device=context.device) if step % 2 == 0 else None
        result, _ = op.combine(rows, None, ids, out=out)
        assert out is None or result is out
        expected = layer(mine, num_experts)
        assert torch.equal(result[: len(expected)].float().cpu(), expected)
    manager.destroy()


def valid_rows(op: Any, rows: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Which rows of dispatch's result a token has come in, bool of its leading sizes."""
    if op.config.layout == "expert_major":
        row = torch.arange(rows.shape[1], device=rows.device)
        return row < op.expert_recv_count[:, None]
    return (ids != -1).any(-1)


def outputs(op: Any, got: tuple[Any, ...]) -> torch.Tensor:
    """What the experts of this rank make of the valid rows, [N, H] in the order of the rows."""
    rows, weights, _, ids, _ = got
    first, num_local = op.config.first_expert, op.config.num_local_experts
    valid = valid_rows(op, rows, ids)
    if op.config.layout == "expert_major":
        expert = torch.arange(first, first + num_local, device=rows.device)[:, None, None]
        return (rows.float() * factor(expert)).to(rows.dtype)[valid]
    local = (ids >= first) & (ids < first + num_local)
    scale = torch.where(local, weights * factor(ids), 0).sum(-1, keepdim=True)
    return (rows.float() * scale).to(rows.dtype)[valid]


def expected_rows(rank: int, everyone: list[Batch]) -> list[tuple[int, int]]:
    """(source, token) of all tokens that come to a rank, ascending."""
    num_experts = EXPERTS_PER_RANK * len(everyone)
    return [
        (source, token)
        for source, each in enumerate(everyone)
        for token in destination_mask(each.ids, num_experts, len(everyone))[:, rank].nonzero().flatten().tolist()
    ]


def check_dispatched(can: Capabilities, op: Any, got: tuple[Any, ...], everyone: list[Batch]) -> None:
    """Every row once, as it was sent, in the order that the backend declares, and counted right."""
    rank, world_size = op.config.rank, len(everyone)
    first, num_local = op.config.first_expert, op.config.num_local_experts
    expected = expected_rows(rank, everyone)
    named = torch.cat([each.ids.flatten() for each in everyone])
    per_expert = torch.bincount(named[(named >= first) & (named < first + num_local)] - first, minlength=num_local)
    counted = op.local_expert_count.cpu()
    if can.dropped_slots == "yes":
        assert counted.tolist() == per_expert.tolist()
    else:
        assert bool((counted >= per_expert).all())
    rows = got[0].cpu()
    if op.config.layout == "expert_major":
        assert op.expert_recv_count.tolist() == counted.tolist()
        check_expert_rows(can, op, rows, everyone)
        return
    valid = valid_rows(op, got[0], got[3]).cpu()
    origins = [(int(row[SOURCE]), int(row[TOKEN])) for row in rows[valid]]
    assert sorted(origins) == expected
    check_order(can, origins)
    assert got[4].tolist() == [len(expected)]
    if can.recv_counts:
        assert op.recv_counts.tolist() == [sum(source == s for s, _ in expected) for source in range(world_size)]
    if can.source_positions != "no":
        stride = world_size * MAX_TOKENS
        assert op.get_dispatch_src_token_pos().tolist() == [source * stride + token for source, token in origins]
    ids, weights = got[3].cpu()[valid], got[1].cpu()[valid]
    for row, (source, token) in enumerate(origins):
        sent = everyone[source]
        assert torch.equal(rows[valid][row], sent.x[token])
        local = (sent.ids[token] >= first) & (sent.ids[token] < first + num_local)
        compared = local if can.ids == "local" else slice(None)
        assert torch.equal(ids[row][compared], sent.ids[token][compared])
        assert torch.equal(weights[row][compared], sent.weights[token][compared])
        if can.ids == "local":
            assert bool((ids[row][~local] == -1).all())


def check_expert_rows(can: Capabilities, op: Any, rows: torch.Tensor, everyone: list[Batch]) -> None:
    """Each expert has one row of each token that names it; others too where dropped slots are sent with weight 0."""
    for expert, count in enumerate(op.expert_recv_count.tolist()):
        number = op.config.first_expert + expert
        expected = [
            (source, token)
            for source, each in enumerate(everyone)
            for token in (each.ids == number).any(1).nonzero().flatten().tolist()
        ]
        origins = [(int(row[SOURCE]), int(row[TOKEN])) for row in rows[expert, :count]]
        if can.dropped_slots == "yes":
            assert sorted(origins) == expected
        else:
            assert len(set(origins)) == len(origins)
            assert set(origins) >= set(expected)
        check_order(can, origins)
        for row, (source, token) in zip(rows[expert], origins):
            assert torch.equal(row, everyone[source].x[token])


def check_order(can: Capabilities, origins: list[tuple[int, int]]) -> None:
    """Rows come in the order that the capabilities declare."""
    if can.row_order == "source, token":
        assert origins == sorted(origins)
    elif can.row_order == "source":
        assert [source for source, _ in origins] == sorted(source for source, _ in origins)
