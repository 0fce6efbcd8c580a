"""Makes the prepare/finalize of vLLM's MoE layers."""

from __future__ import annotations

from typing import Any

from ep_a2a.errors import StateError, UnsupportedError
from ep_a2a.integrations.vllm.manager import VllmAll2AllManager
from ep_a2a.integrations.vllm.wire import tokens_per_rank


def make_prepare_finalize(moe: Any, *, use_monolithic: bool) -> Any:
    """Ours for a layer whose tokens travel between ranks.

    Args:
        moe: vLLM's FusedMoEConfig.
        use_monolithic: the experts want router logits instead of ids.

    Raises:
        StateError: the expert-parallel group does not carry our manager.
        UnsupportedError: monolithic experts.
    """
    from vllm.distributed import get_ep_group

    from ep_a2a.integrations.vllm.prepare_finalize import EpA2APrepareAndFinalize

    manager = get_ep_group().device_communicator.all2all_manager
    if not isinstance(manager, VllmAll2AllManager):
        raise StateError(
            "the ep_a2a manager on vLLM's expert-parallel group", type(manager).__name__,
            "Choose the backend by --all2all-backend ep_a2a before the groups are made.",
        )  # fmt: skip
    if use_monolithic:
        raise UnsupportedError(
            "experts that work on dispatched ids (modular kernels)", "monolithic ones, which want router logits",
            "Choose other experts, for example --moe-backend triton, or --all2all-backend allgather_reducescatter.",
        )  # fmt: skip
    most = tokens_per_rank(moe.max_num_tokens, moe.moe_parallel_config.sp_size)
    return EpA2APrepareAndFinalize(manager, moe, most)
