"""Libraries' interfaces on CPU processes, as their sources have them, where the libraries themselves need GPUs.

They show that our managers keep to what the kernels take for granted, and that the arithmetic around them is right; of
the libraries they show nothing.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a.managers.external.libraries import Library
from ep_a2a.managers.external.mori import MoriLowLatencyAll2AllManager
from ep_a2a.managers.external.pplx import PplxAll2AllManager
from ep_a2a.ops import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp


class PplxAllToAll:
    """pplx_kernels.AllToAll.intranode: csrc/all_to_all/intranode_{dispatch,combine}.cu of commit 12cecfd.

    There is room for max_num_tokens rows of each source at each expert, a row of a token is combined from where its
    expert and number say, and combine waits for experts_per_token rows of each token.
    """

    def __init__(self, group: dist.ProcessGroup, **sizes: Any) -> None:
        self._group, self._sizes = group, SimpleNamespace(**sizes)
        self._origins: list[list[tuple[int, int]]] = []

    @classmethod
    def intranode(cls, *, group_name: str, **sizes: Any) -> PplxAllToAll:
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        return cls(resolve(group_name), **sizes)

    def _gather(self, own: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._sizes.world_size
        dist.all_gather_object(everyone, own, group=self._group)
        return everyone

    def dispatch(
        self,
        *,
        out_expert_num_tokens: torch.Tensor,
        out_expert_x: torch.Tensor,
        out_expert_x_scale: torch.Tensor | None,
        dp_x: torch.Tensor,
        dp_x_scale: torch.Tensor | None,
        indices: torch.Tensor,
        bound_m: torch.Tensor | None,
    ) -> None:
        assert out_expert_x_scale is dp_x_scale is bound_m is None
        assert indices.dtype == out_expert_num_tokens.dtype == torch.uint32
        ids = indices.to(torch.int64)
        assert bool((ids < self._sizes.num_experts).all()), "counted and sent past the buffers' end"
        assert all(len(set(row)) == len(row) for row in ids.tolist()), "rows of a token on top of each other"
        everyone = self._gather((dp_x, ids))
        num_local = self._sizes.num_experts // self._sizes.world_size
        self._origins = []
        for expert in range(num_local):
            number = self._sizes.rank * num_local + expert
            found = [
                (source, token)
                for source, (_, others) in enumerate(everyone)
                for token in (others == number).any(1).nonzero().flatten().tolist()
            ]
            assert all(sum(s == source for s, _ in found) <= self._sizes.max_num_tokens for source, _ in found)
            for row, (source, token) in enumerate(found):
                out_expert_x[expert, row] = everyone[source][0][token]
            out_expert_num_tokens[expert] = len(found)
            self._origins.append(found)

    def combine(
        self,
        *,
        out_tokens: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        expert_y: torch.Tensor,
        bound_m: torch.Tensor | None,
    ) -> None:
        assert bound_m is None
        num_local = len(self._origins)
        rows = {
            (source, self._sizes.rank * num_local + expert, token): expert_y[expert, row]
            for expert, found in enumerate(self._origins)
            for row, (source, token) in enumerate(found)
        }
        everyone = {key: row for part in self._gather(rows) for key, row in part.items()}
        for token, ids in enumerate(indices.to(torch.int64).tolist()):
            came = [everyone[self._sizes.rank, expert, token].float() for expert in ids]
            assert len(came) == self._sizes.experts_per_token
            out_tokens[token] = (weights[token, :, None] * torch.stack(came)).sum(0)

    def destroy(self) -> None:
        self._origins = []


class InterNodeV1LLOp(EpDispatchCombineOp):
    """MORI's op, on our kernels, with what InterNodeV1LL takes for granted (src/ops/dispatch_combine/internode_v1.cpp).

    Its sender and its receiver divide every id by the experts of a rank: -1 / 8 is rank 0.
    """

    def dispatch(self, input: torch.Tensor, weights: Any, scales: Any, indices: torch.Tensor, **options: Any) -> Any:  # noqa: A002
        self._require_experts(indices)
        return super().dispatch(input, weights, scales, indices, **options)

    def combine(self, input: torch.Tensor, weights: Any, indices: torch.Tensor, **options: Any) -> Any:  # noqa: A002
        self._require_experts(indices)
        return super().combine(input, weights, indices, **options)

    def _require_experts(self, ids: torch.Tensor) -> None:
        assert bool(((ids >= 0) & (ids < self.config.total_experts)).all())


class StandIn(Library):
    """A library whose modules are given."""

    modules: Any

    def problem(self) -> str | None:
        return None

    def load(self, name: str = "") -> Any:
        return getattr(self.modules, name) if name else self.modules


class PplxStandIn(StandIn):
    modules = SimpleNamespace(AllToAll=PplxAllToAll)


class MoriStandIn(StandIn):
    modules = SimpleNamespace(
        ops=SimpleNamespace(
            EpDispatchCombineConfig=EpDispatchCombineConfig,
            EpDispatchCombineKernelType=EpDispatchCombineKernelType,
            EpDispatchCombineOp=InterNodeV1LLOp,
        ),
        shmem=ep_a2a.shmem,
    )


class PplxManager(PplxAll2AllManager):
    """pplx's manager on what stands for it."""

    library = PplxStandIn("pplx_kernels", "pplx-kernels", "")
    capabilities = replace(PplxAll2AllManager.capabilities, runs_on_cpu=True)


class MoriLowLatencyManager(MoriLowLatencyAll2AllManager):
    """MORI's low-latency manager on what stands for it."""

    library = MoriStandIn("mori", "amd-mori", "")
    capabilities = replace(MoriLowLatencyAll2AllManager.capabilities, runs_on_cpu=True)
