"""Which of this package's kernels serve a topology: known without torch, for whoever only wants to be told."""

from __future__ import annotations

from ep_a2a.config.enums import EpDispatchCombineKernelType

WHOLE_STEP_MAX_TOKENS = 512
"""Up to this M rings between nodes hold a whole step (bench/results/2026-11-23_h200x2_nodes.md)."""


def inter_node_kernel(max_num_tokens: int) -> EpDispatchCombineKernelType:
    """The kernel that serves steps of at most M tokens on several nodes; not measured on a network yet."""
    if isinstance(max_num_tokens, int) and max_num_tokens <= WHOLE_STEP_MAX_TOKENS:
        return EpDispatchCombineKernelType.InterNodeV1LL
    return EpDispatchCombineKernelType.InterNodeV1


def picked_kernel(num_nodes: int, max_num_tokens: int | None = None) -> tuple[str, str]:
    """Name of the kernel that an op gets, and why.

    Args:
        num_nodes: nodes of the group.
        max_num_tokens: M, the most tokens that a rank of the op may bring; None names every kernel that there can be.
    """
    if num_nodes == 1:
        return EpDispatchCombineKernelType.IntraNode.name, "all ranks on one node"
    hops = f"{num_nodes} nodes: one hop between them, one inside"
    few, many = EpDispatchCombineKernelType.InterNodeV1LL.name, EpDispatchCombineKernelType.InterNodeV1.name
    if max_num_tokens is None:
        return f"{few} or {many}", f"{hops}; {few} for ops of at most {WHOLE_STEP_MAX_TOKENS} tokens of a rank"
    picked = inter_node_kernel(max_num_tokens).name
    bound = "at most" if picked == few else "more than"
    return picked, f"{hops}; ops of {max_num_tokens} tokens of a rank are {bound} {WHOLE_STEP_MAX_TOKENS}"
