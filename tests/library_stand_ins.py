"""Libraries' interfaces on CPU processes, as their sources have them, where the libraries themselves need GPUs.

They show that our managers keep to what the kernels take for granted, and that the arithmetic around them is right; of
the libraries they show nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a.managers.external.flashinfer import FlashInferOneSidedAll2AllManager, FlashInferTwoSidedAll2AllManager
from ep_a2a.managers.external.library import Library
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


@dataclass
class Options:
    """flashinfer.moe_ep's BootstrapConfig, MoEEpCommParams and configs, as far as they are passed."""

    world_size: int = 0
    rank: int = 0
    num_experts: int = 0
    top_k: int = 0
    max_tokens_per_rank: int = 0
    hidden_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    extra_payload_bytes_per_token: int = 0
    use_low_precision_combine: bool = False
    comm_backend: Any = None


class TorchDistBackend:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group


class NVLinkAlltoAll:
    """What both communications of flashinfer.moe_ep 0.7.4 have in common: rows of a source in any order, no copies."""

    compact = False

    def __init__(self, bootstrap: Options, params: Options, config: Options) -> None:
        self.rank, self.params, self.config = bootstrap.rank, params, config
        self._origins: list[tuple[int, int, int]] | None = None
        most = dist.get_world_size(config.comm_backend.group) * params.max_tokens_per_rank
        self._memory = torch.zeros(most, params.hidden_size, dtype=params.dtype)

    def _gather(self, own: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size(self.config.comm_backend.group)
        dist.all_gather_object(everyone, own, group=self.config.comm_backend.group)
        return everyone

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        runtime_max_tokens_per_rank: int,
    ) -> SimpleNamespace:
        assert self._origins is None
        assert 0 < runtime_max_tokens_per_rank <= self.params.max_tokens_per_rank
        assert topk_ids.dtype == torch.int32
        assert self.compact or bool(((topk_ids >= 0) & (topk_ids < self.params.num_experts)).all())
        everyone = self._gather((hidden_states, topk_ids, topk_weights, hidden_states_scale))
        self._origins, self._num_tokens = [], len(hidden_states)
        self._num_rows = len(everyone) * runtime_max_tokens_per_rank
        num_local = self.params.num_experts // len(everyone)
        for source, (_, ids, *_) in enumerate(everyone):
            came = (ids.div(num_local, rounding_mode="floor") == self.rank).any(1).nonzero().flatten().tolist()
            start = len(self._origins) if self.compact else source * runtime_max_tokens_per_rank
            self._origins += [(start + row, source, token) for row, token in enumerate(reversed(came))]
        received = []
        for payload, own in enumerate((hidden_states, topk_ids, topk_weights, hidden_states_scale)):
            if own is None:
                received.append(None)
                continue
            assert (own.shape[1] * own.itemsize) % (16 if payload in (0, 3) else 4) == 0
            rows = own.new_empty(self._num_rows, own.shape[1])
            rows.view(torch.uint8).fill_(0xFF)
            for row, source, token in self._origins:
                rows[row] = everyone[source][payload][token]
            received.append(rows)
        if self.compact:
            ids = received[1]
            ids[ids.div(num_local, rounding_mode="floor") != self.rank] = -1
        names = ("hidden_states", "topk_ids", "topk_weights", "hidden_states_scale")
        return SimpleNamespace(**dict(zip(names, received, strict=True)))

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[: self._num_rows].view(dtype)

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        assert self._origins is not None
        rows = [(source, token, expert_output[row]) for row, source, token in self._origins]
        result = expert_output.new_zeros(self._num_tokens, self.params.hidden_size)
        for part in self._gather(rows):
            for source, token, row in part:
                if source == self.rank:
                    result[token] += row
        self._origins = None
        return result if output is None else output.copy_(result)

    def destroy(self) -> None:
        assert self._origins is None


class NVLinkTwoSidedAlltoAll(NVLinkAlltoAll):
    compact = True


class NVLinkOneSidedAlltoAll072(NVLinkAlltoAll):
    """As release 0.7.2.post1 names the bound of a step."""

    def dispatch(self, *rows: torch.Tensor, max_tokens_per_rank: int, **scales: Any) -> SimpleNamespace:  # type: ignore[override]
        return super().dispatch(*rows, runtime_max_tokens_per_rank=max_tokens_per_rank, **scales)


def flashinfer_modules(one_sided: type[NVLinkAlltoAll] = NVLinkAlltoAll) -> dict[str, Any]:
    """Modules of FlashInfer by name, for sys.modules."""
    moe_ep = SimpleNamespace(
        BootstrapConfig=Options,
        MoEEpCommParams=Options,
        NVLinkOneSidedConfig=Options,
        NVLinkTwoSidedConfig=Options,
        NVLinkOneSidedAlltoAll=one_sided,
        NVLinkTwoSidedAlltoAll=NVLinkTwoSidedAlltoAll,
    )
    return {
        "flashinfer": SimpleNamespace(),
        "flashinfer.comm": SimpleNamespace(),
        "flashinfer.comm.mnnvl": SimpleNamespace(TorchDistBackend=TorchDistBackend),
        "flashinfer.moe_ep": moe_ep,
    }


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


class FlashInferOneSidedManager(FlashInferOneSidedAll2AllManager):
    """FlashInfer's manager; its modules are those of `flashinfer_modules`."""

    library = StandIn("flashinfer", "flashinfer-python", "")
    capabilities = replace(FlashInferOneSidedAll2AllManager.capabilities, runs_on_cpu=True)


class FlashInferTwoSidedManager(FlashInferTwoSidedAll2AllManager):
    """As FlashInferOneSidedManager."""

    library = StandIn("flashinfer", "flashinfer-python", "")
    capabilities = replace(FlashInferTwoSidedAll2AllManager.capabilities, runs_on_cpu=True)


class MoriLowLatencyManager(MoriLowLatencyAll2AllManager):
    """MORI's low-latency manager on what stands for it."""

    library = MoriStandIn("mori", "amd-mori", "")
    capabilities = replace(MoriLowLatencyAll2AllManager.capabilities, runs_on_cpu=True)
