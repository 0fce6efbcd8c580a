"""The backend pplx: rows by expert, which combine weighs; over NVLink on one node, NVSHMEM on several."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.interface import CombineResult
from ep_a2a.managers.external import conversions
from ep_a2a.managers.external import library as lib
from ep_a2a.ops.arguments import CombineArguments, Step, leading_dims
from ep_a2a.topology import Topology

LIBRARY = lib.Library(
    "pplx_kernels",
    "pplx-kernels",
    "build it from github.com/ppl-ai/pplx-kernels (with NVSHMEM)",
    needs=(":AllToAll", "nvshmem:nvshmem_init"),
)

NVSHMEM = lib.SingleGroupGuard("NVSHMEM", by_ranks=False)


class PplxOp(lib.LibraryDispatchCombineOp):
    """An op of layout expert_major: tokens [E, W * M, H] whatever step_tokens is.

    `expert_recv_count` rows of each expert are there. dispatch returns None for weights and ids. combine multiplies by
    the weights that dispatch was given.

    pplx's kernels wait for K rows of every token, and have room for one per token and expert. So slots without an
    expert go to experts that the token does not name, with weight 0.
    """

    def _allocated(self, manager: lib.LibraryAll2AllManager, topology: Topology, index: int) -> Any:
        config, device, most = self.config, self.device, self.config.max_num_inp_token_per_rank
        lead = leading_dims(config, most).rows
        self._tokens = torch.empty(*lead, config.hidden_dim, dtype=config.wire_dtype, device=device)
        scales = torch.empty(*lead, config.num_scales, dtype=torch.float32, device=device)
        self._scales = scales if config.num_scales else None
        self._result = torch.empty(most, config.hidden_dim, dtype=config.combined_dtype, device=device)
        sizes = {
            "max_num_tokens": most,
            "num_experts": config.total_experts,
            "experts_per_token": config.topk,
            "rank": config.rank,
            "world_size": config.world_size,
            "dp_size": 1,
            "hidden_dim": config.hidden_dim,
            "hidden_dim_bytes": config.hidden_dim * config.wire_dtype.itemsize,
            "hidden_dim_scale_bytes": config.num_scales * config.scale_bytes,
        }
        pplx_kernels = manager.library.load()
        if topology.internode:
            return pplx_kernels.AllToAll.internode(**sizes)
        return pplx_kernels.AllToAll.intranode(**sizes, group_name=manager.cpu_group.group_name)

    def _exchange_rows(self, step: Step) -> lib.ReceivedRows:
        counts, config = self._expert_recv_count.view(torch.uint32), self.config
        ids = conversions.filled_ids(step.ids, config.total_experts, config.first_expert)
        self._sent_ids = ids.view(torch.uint32)
        self._native.dispatch(
            out_expert_num_tokens=counts,
            out_expert_x=self._tokens,
            out_expert_x_scale=self._scales,
            dp_x=step.tokens,
            dp_x_scale=step.scales,
            indices=self._sent_ids,
            bound_m=None,
        )
        return lib.ReceivedRows(self._tokens, self._scales, per_expert=self._expert_recv_count)

    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        assert step.weights is not None  # layout expert_major needs them, which has been checked
        valid = conversions.valid_ids(step.ids, self.config.total_experts)
        self._native.combine(
            out_tokens=self._result,
            indices=self._sent_ids,
            weights=torch.where(valid, step.weights, 0),
            expert_y=args.rows,
            bound_m=None,
        )
        return self._combine_result(self._result, args)

    def _destroy(self) -> None:
        self._native.destroy()


class PplxAll2AllManager(lib.LibraryAll2AllManager):
    """`pplx_kernels.AllToAll`, each rank its own data-parallel replica."""

    backend = "pplx"
    library = LIBRARY
    op_type = PplxOp
    capabilities = replace(
        lib.EXPERT_ROWS,
        recv_counts=False,
        dropped_slots="weight 0",
        token_dtypes=("bfloat16", "float16", "float8_e4m3fn"),
        scales_per_128=True,
        combine_dtypes=("bfloat16", "float16"),
        hidden_multiple=512,
        topk_within_experts=True,
        min_ranks=2,
        was_run="not run; arguments compared with pplx-kernels' source, 12cecfd",
        notes=(
            "total_recv counts a row per expert",
            "rows for M tokens whatever step_tokens is",
            "an id may not stand twice in a token",
            "across nodes: one group per process",
        ),
    )

    def _group_guard(self, topology: Topology) -> lib.SingleGroupGuard | None:
        return NVSHMEM if topology.internode else None

    def _set_up(self) -> None:
        nvshmem, group = self.library.load("nvshmem"), self.cpu_group
        unique = nvshmem.nvshmem_get_unique_id() if self.rank == 0 else nvshmem.nvshmem_alloc_empty_unique_id()
        dist.broadcast(unique, group=group, group_src=0)
        nvshmem.nvshmem_init(uid=unique, rank=self.rank, world_size=self.world_size)
