"""The backends mori and mori_low_latency: AMD's dispatch and combine for ROCm GPUs, by MORI's own op."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.errors import ConfigError, DeviceMemoryError, UnsupportedError
from ep_a2a.interface import CombineResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import conversions
from ep_a2a.managers.external import library as lib
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.topology import Topology

LIBRARY = lib.Library(
    "mori",
    "amd-mori",
    "pip install 'amd-mori>=1.2.1', on a machine with ROCm",
    "1.2.1",
    needs=("ops:EpDispatchCombineOp", "ops:EpDispatchCombineConfig", "shmem:shmem_torch_process_group_init"),
)
GROUP_NAME = "mori"
NO_EXPERT = -1

SYMMETRIC_MEMORY = lib.SingleGroupGuard("MORI", by_ranks=False)
"""MORI allocates collectively, over the first group that it was given."""


class MoriOp(lib.LibraryDispatchCombineOp):
    """An op around MORI's op. Its outputs lie in MORI's symmetric memory, and are valid until the next call.

    InterNodeV1LL would send a slot with id -1 to rank 0. It gets an expert in every slot, of a rank that the token goes
    to anyway, and weights that mark the slots without one. There, a token without an expert is a row without ids on its
    own rank.
    """

    def _allocated(self, manager: lib.LibraryAll2AllManager, topology: Topology, index: int) -> Any:
        mori, config = manager.library.load(), self.config
        self._fills_slots = config.kernel_type is KernelType.InterNodeV1LL
        native_config = mori.ops.EpDispatchCombineConfig(**native_fields(mori, config))
        return mori.ops.EpDispatchCombineOp(native_config)

    def _exchange_rows(self, step: Step) -> lib.ReceivedRows:
        config = self.config
        # MORI's kernels between nodes copy weights even if there are none
        weights = self._some_weights(step)
        valid = conversions.valid_ids(step.ids, config.total_experts)
        if self._fills_slots:
            self._sent_ids = conversions.routed_ids(step.ids, config.total_experts, config.first_expert)
            weights = conversions.marked_weights(weights, valid)
        else:
            # for ids past the last expert, MORI's kernels between nodes would combine rows of an earlier step
            self._sent_ids = torch.where(valid, step.ids, NO_EXPERT)
        tokens, weights, scales, ids, total = self._native.dispatch(
            input=step.tokens, weights=weights, scales=step.scales, indices=self._sent_ids
        )
        # MORI sizes its outputs for M tokens of each rank; at most this many rows have come
        rows = step.bounds.num_rows
        ids, weights = ids[:rows], weights[:rows]
        if self._fills_slots:
            ids, weights = conversions.unmarked(ids, weights)
        ids = conversions.padded_ids(ids, total, step.pad_id)
        return lib.ReceivedRows(
            tokens[:rows], None if step.scales is None else scales[:rows], ids, weights, total=total
        )

    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        # MORI's combine takes this rank's own indices, never those that dispatch returned
        result, sums = self._native.combine(input=args.rows, weights=args.weights, indices=self._sent_ids)
        combined = self._combine_result(result, args, sums)
        if self._fills_slots:
            named = conversions.valid_ids(step.ids, self.config.total_experts).any(1, keepdim=True)
            combined.tokens[: step.num_tokens].masked_fill_(~named, 0)
        return combined

    def _positions(self) -> torch.Tensor:
        positions: torch.Tensor = self._native.get_dispatch_src_token_pos()
        return positions


class MoriAll2AllManager(lib.LibraryAll2AllManager):
    """MORI with AITER's choice of kernels: IntraNode on one node, InterNodeV1 on several (mori_high_throughput)."""

    backend = "mori"
    library = LIBRARY
    op_type = MoriOp
    group_guard = SYMMETRIC_MEMORY
    inter_node_kernel = KernelType.InterNodeV1
    capabilities = Capabilities(
        layouts=("compact",),
        row_order="any",
        recv_counts=False,
        token_dtypes=("bfloat16", "float32", "float8_e4m3fn"),
        combine_dtypes=("bfloat16", "float32"),
        combine_casts=("none", "fp8_direct_cast", "fp8_blockwise"),
        combine_cast_dtypes=("bfloat16",),
        combine_casts_between_nodes=False,
        max_topk=9,
        even_experts=True,
        receive_cap=True,
        gpus=("AMD",),
        rdma="across nodes",
        was_run="not run (no AMD GPU); arguments compared with amd-mori 1.2.4's source",
        notes=(
            "one process group per process",
            "float8_e4m3fnuz, fp4: not through this package",
            "dropped slots come as -1",
        ),
    )

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> lib.LibraryDispatchCombineOp:
        if topology.internode:
            config = dataclasses.replace(config, kernel_type=self.inter_node_kernel)
        return super()._make_op(config, topology, index)

    def _check(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> None:
        first = dist.get_global_rank(self.cpu_group, 0)
        if first != 0:
            raise UnsupportedError(
                "a group that begins with global rank 0, from which MORI broadcasts",
                f"{first}",
                "Use the backend 'ep_a2a'.",
            )
        super()._check(config, topology, index)

    def _set_up(self) -> None:
        mori = self.library.load()
        register: Any = torch._C._distributed_c10d._register_process_group
        register(GROUP_NAME, self.cpu_group)
        status = mori.shmem.shmem_torch_process_group_init(group_name=GROUP_NAME)
        if status:
            raise DeviceMemoryError(
                "MORI's symmetric memory",
                f"status {status} of shmem_torch_process_group_init",
                "Look at MORI_SHMEM_HEAP_SIZE and at MORI's log.",
            )

    @classmethod
    def kernel_for(cls, num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
        """Returns the name of MORI's kernel for this number of nodes, and the reason. Local."""
        return f"mori {(cls.inter_node_kernel if num_nodes > 1 else KernelType.IntraNode).name}", f"{num_nodes} node(s)"


class MoriLowLatencyAll2AllManager(MoriAll2AllManager):
    """MORI with InterNodeV1LL between nodes, as vLLM's mori_low_latency; on one node the same as `mori`."""

    backend = "mori_low_latency"
    inter_node_kernel = KernelType.InterNodeV1LL
    capabilities = dataclasses.replace(
        MoriAll2AllManager.capabilities,
        notes=(
            *MoriAll2AllManager.capabilities.notes,
            "across nodes: weights of dropped slots come as 0",
            "across nodes: a token without an expert is a row without ids on its own rank",
        ),
    )


def native_fields(mori: Any, config: EpDispatchCombineConfig) -> dict[str, Any]:
    """Returns the arguments of MORI's config. Ours has its fields, and further ones that are keyword-only.

    Raises:
        ConfigError: MORI's config has a required field that ours does not know.
    """
    ours = (each.name for each in dataclasses.fields(config) if not each.kw_only)
    values = {name: getattr(config, name) for name in ours} | {
        "data_type": config.wire_dtype,
        "scale_dim": config.num_scales,
        "scale_type_size": config.scale_bytes,
        "use_external_inp_buf": True,
        "kernel_type": getattr(mori.ops.EpDispatchCombineKernelType, config.kernel_type.name),
        "quant_type": config.combine_quant.value,
    }
    theirs = dataclasses.fields(mori.ops.EpDispatchCombineConfig)
    unknown = [each.name for each in theirs if each.name not in values and _is_required(each)]
    if unknown:
        raise ConfigError(
            "fields of ep_a2a's config in MORI's EpDispatchCombineConfig",
            f"{', '.join(unknown)} required besides",
            "Use amd-mori 1.2.1 or later, or the backend 'ep_a2a'.",
        )
    return {each.name: values[each.name] for each in theirs if each.name in values}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
