"""Runs one rank of the demo: its tokens and experts, and the op between them."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a.commands.demo.model import embed, expert_weights, route
from ep_a2a.commands.demo.settings import TOKEN_DTYPE
from ep_a2a.managers.collective import CollectiveAll2AllManager
from ep_a2a.parallel.state import destroy_dist_env, get_ep_group, init_dist_env
from ep_a2a.quantization import dequantize
from ep_a2a.reference import dense_moe
from ep_a2a.routing import expert_ranges

if TYPE_CHECKING:
    from ep_a2a.commands.demo.settings import DemoSettings
    from ep_a2a.interface import DispatchResult
    from ep_a2a.testing.worker import RankContext

NUM_STEPS = 4
"""Steps of a run. The first one warms up and is not timed."""
PHASES = ("dispatch", "experts", "combine")
"""Timed parts of a step."""


@dataclass(frozen=True)
class RankResult:
    """Result of a rank after its last step.

    Attributes:
        tokens: its embedded tokens `[T, H]`. weights, ids: their routing, `[T, K]`.
        output: what combine returned for them, `[T, H]`.
        rows_received: rows from each rank in the last step.
        seconds: of each of PHASES, by timed step.
        explanation: its manager's `explain()`.
        device_name: of its GPU, or "".
        gathers_all_tokens: whether the backend brings every token to every rank, wanted or not.
        versions: of torch, and of Triton where the backend has loaded it.
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    output: torch.Tensor
    rows_received: list[int]
    seconds: list[list[float]]
    explanation: dict[str, str]
    device_name: str
    gathers_all_tokens: bool
    versions: dict[str, str]


def run_rank(
    context: RankContext, settings: DemoSettings, text_tokens: tuple[str, ...], corrupt_rank: int | None
) -> RankResult:
    """Runs NUM_STEPS steps of the layer on this rank. Collective.

    Args:
        settings: sizes and choices. text_tokens: tokens of all ranks, in order.
        corrupt_rank: rank whose experts return one wrong row, to test that the comparison finds it.
    """
    rank, device, is_gpu = context.rank, context.device, context.device.type == "cuda"
    init_dist_env(
        1,
        0,
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        local_rank=rank,
        data_parallel_size=context.world_size,
        data_parallel_rank=rank,
        all2all_backend=settings.backend,
    )
    group = get_ep_group()
    manager = group.device_communicator.all2all_manager
    kwargs = settings.handle_kwargs(rank)
    op = manager.get_handle(kwargs)
    first = sum(settings.tokens_per_rank[:rank])
    tokens = embed(
        text_tokens[first : first + settings.tokens_per_rank[rank]], first, settings.hidden_dim, settings.seed
    ).to(device)
    weights, ids = route(tokens, settings.num_experts, settings.topk, settings.seed)
    experts = range(*expert_ranges(settings.num_experts, settings.num_ranks)[rank])
    projections = [each.to(device) for each in expert_weights(experts, settings.hidden_dim, settings.seed)]

    def now() -> float:
        if is_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    steps = []
    for _ in range(NUM_STEPS):
        dist.barrier(group=group.cpu_group)
        times = [now()]
        received = op.dispatch(tokens, weights, None, ids)
        times.append(now())
        rows, row_weights, row_ids = _valid_rows(received, settings.quant_type)
        returned = op.get_registered_combine_input_buffer(TOKEN_DTYPE, settings.hidden_dim)
        returned[: rows.shape[0]] = dense_moe(rows, row_weights, row_ids - experts.start, *projections)
        if rank == corrupt_rank:
            returned[:1] += 1.0
        times.append(now())
        # Combine sums rows unweighted, so no weights travel back.
        output, _ = op.combine(returned, None, ids)
        times.append(now())
        steps.append([end - start for start, end in itertools.pairwise(times)])
    result = RankResult(
        # The op's memory ends with the group, so the output is copied.
        tokens,
        weights,
        ids,
        output[: tokens.shape[0]].clone(),
        op.recv_counts.tolist(),
        steps[1:],
        manager.explain(settings.gpus_per_node, kwargs["max_num_tokens_per_dp_rank"]),
        torch.cuda.get_device_name(device) if is_gpu else "",
        isinstance(manager, CollectiveAll2AllManager),
        {name: str(sys.modules[name].__version__) for name in ("torch", "triton") if name in sys.modules},
    )
    destroy_dist_env()
    return result


def _valid_rows(received: DispatchResult, quant_type: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the received tokens without the cast, their weights and ids."""
    rows, weights, scales, ids, total_recv = received
    valid = slice(int(total_recv))
    assert weights is not None
    uncast = rows[valid] if scales is None else dequantize(rows[valid], scales[valid], quant_type)
    return uncast, weights[valid], ids[valid]
