"""Wraps FlashInfer's one-sided all-to-all over NVLink, for this package's manager and its benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.managers.external.libraries import Library
from ep_a2a.managers.external.single_group_guard import SingleGroupGuard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

INSTALL = "pip install 'flashinfer-python>=0.7'"
ONE_SIDED = Library(
    "flashinfer",
    "flashinfer-python",
    INSTALL,
    "0.7",
    needs=("comm.mapping:Mapping", "comm.mnnvl:MnnvlConfig", "comm.trtllm_moe_alltoall:MoeAlltoAll"),
)
TWO_SIDED = Library(
    "flashinfer",
    "flashinfer-python",
    INSTALL,
    "0.7",
    needs=("comm.mapping:Mapping", "comm.mnnvl:MnnvlConfig", "comm.trtllm_alltoall:MnnvlMoe"),
)

WORKSPACES = SingleGroupGuard("FlashInfer's workspaces", by_ranks=True)
"""Both classes find a process's workspaces by sizes and rank, not by group. A process agrees on fabric handles once, so
later groups must have the same ranks."""

TOPKS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""Values of K that the one-sided kernels are instantiated for."""
MAX_RANKS = 64
WORKSPACE_ALIGNMENT_BYTES = 128
WORD_BYTES = 16
"""Bytes of the widest store of FlashInfer's dispatch."""


class NVLinkOneSided:
    """FlashInfer's MoeAlltoAll for one set of payloads. dispatch and combine alternate and never wait on the host.

    Construction is collective.

    Args:
        payloads: by name, (elements, dtype) of what travels with each token; rows of any number of bytes.
        num_experts: experts over all ranks, owned linearly.
        topk: experts per token.
        max_num_tokens: most tokens of a rank in any step, >= 1.
        combine_row_bytes: bytes of the rows that combine sums.
        group: all ranks. rank, world_size: this one, and their number.
        index: objects whose steps overlap need different ones; those of one size and index share a workspace.
    """

    def __init__(
        self,
        payloads: Mapping[str, tuple[int, torch.dtype]],
        *,
        num_experts: int,
        topk: int,
        max_num_tokens: int,
        combine_row_bytes: int,
        group: ProcessGroup,
        rank: int,
        world_size: int,
        index: int = 0,
    ) -> None:
        from flashinfer.comm.mnnvl import MnnvlConfig
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank

        self._group, self._world_size = group, world_size
        # FlashInfer packs payloads without gaps. In order of falling alignment, each starts at a multiple of its own.
        ordered = sorted(payloads.items(), key=lambda item: -row_alignment(*item[1]))
        self._dtypes = {name: dtype for name, (_, dtype) in ordered}
        row_bytes = sum(elements * dtype.itemsize for elements, dtype in payloads.values())
        workspace_bytes = moe_a2a_get_workspace_size_per_rank(world_size, max_num_tokens, row_bytes, combine_row_bytes)
        # The class caches workspaces by size, so each index gets a size of its own.
        workspace_bytes += index * WORKSPACE_ALIGNMENT_BYTES
        self._native: Any = MoeAlltoAll(
            ep_mapping(rank, world_size),
            max_num_tokens,
            topk,
            num_experts,
            workspace_size_per_rank=workspace_bytes,
            mnnvl_config=MnnvlConfig(comm_backend=comm_backend(group)),
        )
        # Each rank has zeroed its own counters; no rank may write to them before all have.
        dist.barrier(group)

    def packed(self, payloads: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Returns the payloads [T, n] as `dispatch` takes them; some of the declared ones may be missing."""
        return [payloads[name].view(torch.uint8) for name in self._dtypes if name in payloads]

    def dispatch(
        self, ids: torch.Tensor, packed: Sequence[torch.Tensor], max_num_tokens: int, names: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Sends payloads, and returns the received ones, [W, max_num_tokens, n] by name.

        Their addresses depend on the payloads and max_num_tokens.

        Args:
            ids: int32 [T, K], an expert in every slot.
            packed: from `packed`.
            max_num_tokens: the step's, equal on all ranks.
            names: of the sent payloads; empty if all are sent.
        """
        received = self._native.dispatch(ids, list(packed), max_num_tokens)
        sent = [name for name in self._dtypes if not names or name in names]
        return {name: each.view(self._dtypes[name]) for name, each in zip(sent, received, strict=True)}

    def mark_padding(self, ids: torch.Tensor, pad_id: int) -> None:
        """Overwrites received ids past the received rows, by one launch. For use between dispatch and combine."""
        from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_sanitize_expert_ids

        native = self._native
        moe_a2a_sanitize_expert_ids(ids, native.workspace, native.metainfo, native.ep_rank, pad_id)

    def combine_rows(self, max_num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory [W, max_num_tokens, H] that combine reads in place. For use between dispatch and combine."""
        rows: torch.Tensor = self._native.get_combine_payload_tensor_in_workspace(max_num_tokens, hidden_dim, dtype)
        return rows.view(self._world_size, max_num_tokens, hidden_dim)

    def combine(
        self, rows: torch.Tensor, max_num_tokens: int, out: torch.Tensor, *, in_workspace: bool, fp8: bool = False
    ) -> torch.Tensor:
        """Sums rows [W, max_num_tokens, H] of the ranks that each token went to, into out [T, H].

        Args:
            rows: from `combine_rows` if in_workspace, else any.
            max_num_tokens: that of dispatch.
            out: contiguous.
            in_workspace: combine reads rows in place, else it copies them first.
            fp8: cast rows to fp8 on the wire, without scales.
        """
        result: torch.Tensor = self._native.combine(
            rows, max_num_tokens, payload_in_workspace=in_workspace, output=out, use_low_precision=fp8
        )
        return result

    def close(self) -> None:
        """Unmaps the workspace once no rank uses it. Collective."""
        torch.cuda.synchronize()
        dist.barrier(self._group)
        # The class caches workspaces for the life of the process, so a sweep over sizes would use up memory. An object
        # that shares this workspace may have closed it: then the cache does not have it.
        native, self._native = self._native, None
        if any(each is native._WORKSPACE for each in native._WORKSPACE_CACHE.values()):
            native._reset_workspace()


def row_alignment(elements: int, dtype: torch.dtype) -> int:
    """Returns the largest power of two up to WORD_BYTES that divides a row's bytes."""
    row_bytes = elements * dtype.itemsize
    return min(row_bytes & -row_bytes, WORD_BYTES)


def ep_mapping(rank: int, world_size: int) -> Any:
    """Returns FlashInfer's description of a group on one node with expert parallelism only."""
    from flashinfer.comm.mapping import Mapping as NativeMapping

    return NativeMapping(
        world_size=world_size,
        rank=rank,
        gpus_per_node=world_size,
        tp_size=world_size,
        moe_tp_size=1,
        moe_ep_size=world_size,
    )


def comm_backend(group: ProcessGroup) -> Any:
    """Returns a backend by which FlashInfer exchanges file descriptors over this group; it is never split."""
    from flashinfer.comm.mnnvl import TorchDistBackend

    class WholeGroup(TorchDistBackend):  # type: ignore[misc]
        def Split(self, color: int, key: int) -> Any:
            return self

    return WholeGroup(group)
