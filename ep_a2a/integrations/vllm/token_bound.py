"""What all ranks know of the running step without asking the device."""

from __future__ import annotations

from ep_a2a.errors import TooManyTokensError
from ep_a2a.integrations.vllm.wire import tokens_per_rank


def agreed_max_tokens(most: int, sequence_parallel_size: int) -> int:
    """The most tokens that any rank brings to this step: equal on all ranks, and constant inside a CUDA graph.

    vLLM exchanges the token counts of data-parallel ranks on the host before a forward pass; with sequence parallelism
    each of a replica's ranks takes an equal share, rounded up.

    Args:
        most: the limit when no forward pass is running, and of every step.
        sequence_parallel_size: ranks that share a replica's tokens.

    Raises:
        TooManyTokensError: a rank brings more than `most`; on all ranks, so that none waits for another.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    if metadata is None:
        return most
    tokens = tokens_per_rank(int(metadata.num_tokens_across_dp_cpu.max()), sequence_parallel_size)
    if tokens > most:
        raise TooManyTokensError(f"at most {most} tokens of each rank", str(tokens), "Raise --max-num-batched-tokens.")
    return max(1, tokens)
