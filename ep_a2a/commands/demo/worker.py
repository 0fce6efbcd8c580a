"""Runs one rank of the demo: its part of the layer, in calls that launcher.py makes one after another.

A run makes several calls into the same processes, so that the command can show progress between them.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a.commands.demo.model import SwigluExperts, embed, route
from ep_a2a.commands.demo.settings import TOKEN_DTYPE
from ep_a2a.managers.collective import CollectiveAll2AllManager
from ep_a2a.parallel.state import destroy_dist_env, get_ep_group, init_dist_env
from ep_a2a.quantization import dequantize
from ep_a2a.routing import expert_ranges

if TYPE_CHECKING:
    from ep_a2a.commands.demo.settings import DemoSettings
    from ep_a2a.testing.worker import RankContext


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds that each phase of a step took."""

    dispatch: float
    experts: float
    combine: float


@dataclass(frozen=True)
class RankResult:
    """Result of a rank after its last step.

    Attributes:
        tokens: its embedded tokens `[T, H]`. weights, ids: how they were routed, `[T, K]`.
        output: what combine returned for them, `[T, H]`.
        rows_received: from each rank, in the last step.
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
    explanation: dict[str, str]
    device_name: str
    gathers_all_tokens: bool
    versions: dict[str, str]


class DemoRank:
    """One rank's part of the layer: tokens and experts of its own, and the op. Making one is collective."""

    def __init__(self, context: RankContext, settings: DemoSettings, text_tokens: tuple[str, ...]) -> None:
        self.settings, self.rank, self.device = settings, context.rank, context.device
        backend = "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl"
        init_dist_env(
            1, 0, backend, local_rank=context.rank, data_parallel_size=context.world_size,
            data_parallel_rank=context.rank, all2all_backend=settings.backend,
        )  # fmt: skip
        self.group = get_ep_group()
        self.manager = self.group.device_communicator.all2all_manager
        kwargs = settings.handle_kwargs(context.rank)
        self.op = self.manager.get_handle(kwargs)
        self.explanation = self.manager.explain(settings.gpus_per_node, kwargs["max_num_tokens_per_dp_rank"])

        first = sum(settings.tokens_per_rank[: context.rank])
        own = text_tokens[first : first + settings.tokens_per_rank[context.rank]]
        self.tokens = embed(own, first, settings.hidden_dim).to(self.device)
        self.weights, self.ids = route(self.tokens, settings.num_experts, settings.topk)
        experts = range(*expert_ranges(settings.num_experts, settings.num_ranks)[context.rank])
        self.experts = SwigluExperts(experts, settings.hidden_dim, self.device)
        self.output = torch.empty_like(self.tokens)

    def step(self, corrupt: bool) -> PhaseSeconds:
        """Runs dispatch, experts and combine. `corrupt` changes one row that the experts return."""
        dist.barrier(group=self.group.cpu_group)
        times = [self._now()]
        rows, weights, scales, ids, total_recv = self.op.dispatch(self.tokens, self.weights, None, self.ids)
        times.append(self._now())
        count = int(total_recv)
        returned = self.op.get_registered_combine_input_buffer(TOKEN_DTYPE, self.settings.hidden_dim)
        returned[:count] = self.experts(self._dequantized(rows, scales, count), weights[:count], ids[:count])
        if corrupt:
            returned[:1] += 1.0
        times.append(self._now())
        # Combine sums rows unweighted, so no weights travel back.
        output, _ = self.op.combine(returned, None, self.ids)
        times.append(self._now())
        self.output = output[: self.tokens.shape[0]]
        return PhaseSeconds(*(end - start for start, end in itertools.pairwise(times)))

    def result(self) -> RankResult:
        """Returns this rank's result."""
        # The op's memory ends with the group, so the output is copied.
        return RankResult(
            self.tokens, self.weights, self.ids, self.output.clone(), self.op.recv_counts.tolist(), self.explanation,
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "",
            isinstance(self.manager, CollectiveAll2AllManager),
            {name: str(sys.modules[name].__version__) for name in ("torch", "triton") if name in sys.modules},
        )  # fmt: skip

    def _dequantized(self, rows: torch.Tensor, scales: torch.Tensor | None, count: int) -> torch.Tensor:
        if scales is None:
            return rows[:count].to(torch.float32)
        return dequantize(rows[:count], scales[:count], self.settings.quant_type)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


_rank: DemoRank | None = None
"""This process's rank, between the calls of one run."""


def open_rank(context: RankContext, settings: DemoSettings, text_tokens: tuple[str, ...]) -> None:
    """Makes the EP group, the op and the model on every rank."""
    global _rank
    _rank = DemoRank(context, settings, text_tokens)


def run_step(context: RankContext, corrupt_rank: int | None) -> PhaseSeconds:
    """Runs one step on every rank."""
    return _opened().step(corrupt=context.rank == corrupt_rank)


def close_rank(context: RankContext) -> RankResult:
    """Returns every rank's result, and destroys the EP group."""
    global _rank
    result = _opened().result()
    _rank = None
    destroy_dist_env()
    return result


def _opened() -> DemoRank:
    if _rank is None:
        raise RuntimeError("open_rank comes first")
    return _rank
