"""DeepEP's `Buffer` on this package's ops: names, arguments and results of V1 (commit 567632d)."""

from ep_a2a.compat.deep_ep.low_latency import LowLatencyMode
from ep_a2a.compat.deep_ep.normal import NormalMode


class Buffer(NormalMode, LowLatencyMode):
    """Expert-parallel all-to-all with DeepEP's interface, inside a node and between nodes.

    All ranks make the same calls in the same order. Construction is collective, as is the first call of each shape,
    which makes an op. Ops allocate their memory themselves, and `destroy` frees it; the numbers of bytes have no
    effect. docs/deepep.md lists the differences from DeepEP.

    Args:
        group: the ranks; any backend of torch.distributed.
        num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric:
            DeepEP's, without effect. A warning names once those that were given.
        low_latency_mode: DeepEP's, without effect: both modes can always be called.
        explicitly_destroy: only `destroy` frees memory. Without it, garbage collection of the buffer does, too.
        enable_shrink, comm: not supported.
        device: not DeepEP's. Where tokens are; None = the current CUDA device, or CPU without one.
        max_num_tokens_per_rank: not DeepEP's. The most tokens that any rank brings in normal mode, equal on all ranks.
            One op of this size is made. With 0, larger ops are made as batches grow.
        max_open_steps: not DeepEP's. The most dispatches that wait for their combine at a time. Each beyond the first
            allocates memory when it is first needed.
        gpus_per_node: not DeepEP's. Ranks of a node, which follow one another; None = the ranks' hosts decide. A
            smaller number cuts virtual nodes.

    Attributes:
        rank, group_size, group: this rank, their number, the group.
        num_sms: multiprocessors of `get_dispatch_config` and `get_combine_config`.

    Raises:
        ConfigError: gpus_per_node would put ranks of two hosts on one node.
        UnsupportedError: nodes differ in their number of ranks, their ranks do not follow one another, or an argument
            is not supported.
        ConfigMismatchError: another rank has raised one of these.
    """
