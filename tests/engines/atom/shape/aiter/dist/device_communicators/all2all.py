"""The shape of aiter.dist.device_communicators.all2all; see shape/README.md."""

from __future__ import annotations

import torch
from aiter.dist.device_communicators.base_device_communicator import All2AllManagerBase, Cache


class MoriAll2AllManager(All2AllManagerBase):
    def __init__(self, cpu_group, skip_shmem_init=False):
        import mori

        super().__init__(cpu_group)
        self.handle_cache = Cache()
        torch._C._distributed_c10d._register_process_group("mori", cpu_group)
        mori.shmem.shmem_torch_process_group_init("mori")

    def _make_all2all_kwargs(
        self, rank, num_ep_ranks, input_dtype, quant_dtype, token_hidden_size, scale_dim, scale_type_size,
        max_num_tokens_per_dp_rank, num_local_experts, num_experts_per_token, gpu_per_node, quant_type="none",
        low_latency=False,
    ):
        import mori

        kwargs = {
            "rank": rank, "world_size": num_ep_ranks, "data_type": quant_dtype, "hidden_dim": token_hidden_size,
            "scale_dim": scale_dim, "scale_type_size": scale_type_size, "max_token_type_size": input_dtype.itemsize,
            "max_num_inp_token_per_rank": max_num_tokens_per_dp_rank, "num_experts_per_rank": num_local_experts,
            "num_experts_per_token": num_experts_per_token, "warp_num_per_block": 16, "block_num": 80,
            "kernel_type": mori.ops.EpDispatchCombineKernelType.IntraNode, "rdma_block_num": 0,
            "gpu_per_node": gpu_per_node, "quant_type": quant_type,
        }
        if low_latency:
            kwargs["num_qp_per_pe"] = 2
        return kwargs

    def get_handle(self, kwargs, index=0):
        import mori

        def make(**kwargs):
            return mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(**kwargs))

        return self.handle_cache.get_or_create(self._make_all2all_kwargs(**kwargs), make, index=index)
