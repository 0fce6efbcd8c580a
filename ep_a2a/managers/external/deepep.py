"""DeepEP: its buffers, and the backends deepep_high_throughput, deepep_low_latency and deepep_v2 on them."""

import abc
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.config import FP8_DTYPE, ScaleFormat
from ep_a2a.config.requirements import checked_integer, require
from ep_a2a.interface import CombineResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import conversions
from ep_a2a.managers.external import library as lib
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.routing import count_ids
from ep_a2a.topology import Topology

INSTALL = "build it from github.com/deepseek-ai/DeepEP"
BUFFER = lib.Library("deep_ep", "deep_ep", f"{INSTALL} (with NVSHMEM)", needs=(":Buffer",))
ELASTIC_BUFFER = lib.Library(
    "deep_ep", "deep_ep", f"{INSTALL} (2.0 or later, with NCCL 2.30)", needs=(":ElasticBuffer",)
)

LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_MAX_TOPK = 11
LOW_LATENCY_MAX_TOKENS = 511
"""DeepEP needs 2 * tokens + 2 entries in a queue pair, which has 1024 by default."""
RANK_COUNTS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks in DeepEP's table of launch numbers."""
WAS_RUN = "two H200s of one node, with DeepEP dd758ca"
PREFIX_MATRIX, SOURCE_TOKENS = 0, 3
"""Places in the handle of a dispatch on one node: the prefix sums of rows by (source, destination), tokens by row."""
GLOBAL_PREFIX = 6
"""Place in the handle of a dispatch on several nodes: the prefix sum of rows by source."""
RANGES = 1
"""Place in the handle of a dispatch: rows of each local expert by source."""


COMPACT_ROWS = Capabilities(
    layouts=("compact",),
    ids="local",
    token_dtypes=("bfloat16", "float8_e4m3fn"),
    dispatch_casts=("none", "fp8_per_1x128"),
    scale_formats=("float32", "float32_power_of_two"),
    scales_per_128=True,
    combine_dtypes=("bfloat16",),
    even_experts=True,
    rdma="across nodes",
    was_run=WAS_RUN,
)
"""Capabilities that the backends with dense rows share."""


def topk_dtype(deep_ep: Any) -> torch.dtype:
    """Returns the dtype of expert ids, which DeepEP's build chooses."""
    dtype: torch.dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
    return dtype


class DeepEPOp(lib.LibraryDispatchCombineOp):
    """Base of the ops on one of DeepEP's buffers."""

    def _allocated(self, manager: lib.LibraryAll2AllManager, topology: Topology, index: int) -> Any:
        deep_ep = manager.library.load()
        self._ids_dtype = topk_dtype(deep_ep)
        return self._buffer(deep_ep, manager, topology)

    @abc.abstractmethod
    def _buffer(self, deep_ep: Any, manager: lib.LibraryAll2AllManager, topology: Topology) -> Any:
        """Returns DeepEP's buffer for this op. Collective."""

    def _ids_for_native(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns ids [T, K] in DeepEP's dtype, with -1 in every slot without an expert."""
        return torch.where((ids >= 0) & (ids < self.config.total_experts), ids, -1).to(self._ids_dtype)

    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        result, sums, _ = self._native.combine(x=args.rows, handle=self._handle, topk_weights=args.weights)
        return self._combine_result(result, args, sums)

    def _destroy(self) -> None:
        self._native.destroy()


def rows_and_scales(received: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns DeepEP's received rows and their scales: it returns a pair for quantised rows, else a tensor."""
    return received if isinstance(received, tuple) else (received, None)


class DeepEPHighThroughputOp(DeepEPOp):
    """An op on `deep_ep.Buffer`'s dispatch and combine.

    On one node a step returns as many rows as could come at most, so that the host never waits for their number. On
    several nodes DeepEP makes the host wait, and a step returns the rows that came.
    """

    def _buffer(self, deep_ep: Any, manager: lib.LibraryAll2AllManager, topology: Topology) -> Any:
        world_size, row_bytes = self.config.world_size, self.config.hidden_dim * 2
        self._internode = topology.internode
        num_sms = manager.max_sms_used()
        if num_sms:
            deep_ep.Buffer.set_num_sms(new_num_sms=num_sms)
        nvl = rdma = 0
        for native_config in (
            deep_ep.Buffer.get_dispatch_config(num_ranks=world_size),
            deep_ep.Buffer.get_combine_config(num_ranks=world_size),
        ):
            nvl = max(nvl, native_config.get_nvl_buffer_size_hint(row_bytes, world_size))
            if topology.internode:
                rdma = max(rdma, native_config.get_rdma_buffer_size_hint(row_bytes, world_size))
        return deep_ep.Buffer(
            group=manager.cpu_group,
            num_nvl_bytes=nvl,
            num_rdma_bytes=rdma,
            low_latency_mode=False,
            explicitly_destroy=True,
        )

    def _exchange_rows(self, step: Step) -> lib.ReceivedRows:
        config, native = self.config, self._native
        ids = self._ids_for_native(step.ids)
        per_rank, per_node, per_expert, in_rank, _ = native.get_dispatch_layout(
            topk_idx=ids, num_experts=config.total_experts
        )
        sent = step.tokens if step.scales is None else (step.tokens, step.scales)
        received, local_ids, weights, _, self._handle, _ = native.dispatch(
            x=sent,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=self._some_weights(step),  # DeepEP sends ids only together with weights
            num_worst_tokens=0 if self._internode else step.bounds.num_rows,
        )
        recv_ids = conversions.global_ids(local_ids, config.first_expert, step.pad_id)
        counts = conversions.counts_from_prefix(self._prefix())
        return lib.ReceivedRows(*rows_and_scales(received), recv_ids, weights, per_source=counts)

    def _prefix(self) -> torch.Tensor:
        """Returns the prefix sum [W] of received rows by source."""
        if self._internode:
            prefix: torch.Tensor = self._handle[GLOBAL_PREFIX]
            return prefix
        by_pair: torch.Tensor = self._handle[PREFIX_MATRIX]
        return by_pair[:, self.config.rank]

    def _positions(self) -> torch.Tensor:
        if self._internode:
            raise self._unsupported("source positions on several nodes")
        sources = conversions.sources_of_rows(self._recv_counts)
        tokens = self._handle[SOURCE_TOKENS][: sources.numel()]
        return conversions.positions(sources, tokens, self._position_stride)


class DeepEPHighThroughputAll2AllManager(lib.LibraryAll2AllManager):
    """`deep_ep.Buffer` without low-latency mode; its multiprocessors are bounded by `set_num_sms`, for the process."""

    backend = "deepep_high_throughput"
    library = BUFFER
    op_type = DeepEPHighThroughputOp
    capabilities = replace(
        COMPACT_ROWS,
        hidden_multiple=16,
        rank_counts=RANK_COUNTS,
        notes=("several nodes: the host waits, no CUDA graphs, no source positions",),
    )

    _num_sms = 0

    def set_num_sms(self, num_sms: int) -> None:
        """Bounds the multiprocessors of ops made from now on; an even number, the same on every rank; 0: DeepEP's own.

        Raises:
            ConfigError: num_sms is no even number >= 0.
        """
        num_sms = checked_integer("num_sms", num_sms, 0)
        require(num_sms % 2 == 0, "num_sms", "to be even", str(num_sms))
        self._num_sms = num_sms

    def max_sms_used(self) -> int | None:
        """The number given to set_num_sms; None without a bound."""
        return self._num_sms or None


class DeepEPLowLatencyOp(DeepEPOp):
    """An op of layout expert_major: tokens [E, W * M, H] whatever step_tokens is.

    `expert_recv_count` rows of each expert are there. dispatch returns None for weights and ids. combine multiplies by
    the weights that dispatch was given. With a cast the scales [E, W * M, H / 128] have their last two dimensions
    transposed in memory.
    """

    casts_inside = True

    def _buffer(self, deep_ep: Any, manager: lib.LibraryAll2AllManager, topology: Topology) -> Any:
        config = self.config
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=config.max_num_inp_token_per_rank,
            hidden=config.hidden_dim,
            num_ranks=config.world_size,
            num_experts=config.total_experts,
        )
        return deep_ep.Buffer(
            group=manager.cpu_group,
            num_nvl_bytes=0,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=config.num_local_experts,
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
        )

    def _exchange_rows(self, step: Step) -> lib.ReceivedRows:
        config = self.config
        self._sent_ids = self._ids_for_native(step.ids)
        # num_max_dispatch_tokens_per_rank places DeepEP's signals, which must be zero: the same number in every step.
        received, counts, self._handle, _, _ = self._native.low_latency_dispatch(
            x=step.tokens,
            topk_idx=self._sent_ids,
            num_max_dispatch_tokens_per_rank=config.max_num_inp_token_per_rank,
            num_experts=config.total_experts,
            use_fp8=config.casts_in_dispatch,
            round_scale=config.scale_format != ScaleFormat.FLOAT32,
        )
        sources = conversions.rows_per_source(self._handle[RANGES])
        return lib.ReceivedRows(*rows_and_scales(received), per_source=sources, per_expert=counts)

    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        result, _, _ = self._native.low_latency_combine(
            x=args.rows, topk_idx=self._sent_ids, topk_weights=step.weights, handle=self._handle, out=args.out
        )
        return CombineResult(result, None)


class DeepEPLowLatencyAll2AllManager(lib.LibraryAll2AllManager):
    """`deep_ep.Buffer` in low-latency mode, over NVLink inside a node and RDMA between nodes."""

    backend = "deepep_low_latency"
    library = BUFFER
    op_type = DeepEPLowLatencyOp
    capabilities = replace(
        lib.EXPERT_ROWS,
        token_dtypes=("bfloat16",),
        cast="inside",
        combine_dtypes=("bfloat16",),
        hidden_sizes=LOW_LATENCY_HIDDEN_SIZES,
        max_topk=LOW_LATENCY_MAX_TOPK,
        max_tokens=LOW_LATENCY_MAX_TOKENS,
        was_run=WAS_RUN,
        notes=(
            "an expert's rows lie together by source, the sources as they came",
            "total_recv and recv_counts count a row per expert",
            "rows for M tokens whatever step_tokens is",
            "its documentation asks for RDMA between all ranks",
        ),
    )


class DeepEPV2Op(DeepEPOp):
    """An op of layout compact: as many rows as could come at most, W * step_tokens, so that the host never waits."""

    takes = frozenset({"max_sms"})

    _step_tokens = 1
    """The bound of the latest dispatch."""

    def _buffer(self, deep_ep: Any, manager: lib.LibraryAll2AllManager, topology: Topology) -> Any:
        config, group = self.config, manager.groups.of(self.device)
        # DeepEP builds on NCCL's communicator, which NCCL makes for the first collective
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device), group=group)
        return deep_ep.ElasticBuffer(
            group=group,
            num_max_tokens_per_rank=config.max_num_inp_token_per_rank,
            hidden=config.hidden_dim,
            num_topk=config.topk,
            use_fp8_dispatch=config.wire_dtype == FP8_DTYPE,
            explicitly_destroy=True,
        )

    def _exchange_rows(self, step: Step) -> lib.ReceivedRows:
        config = self.config
        self._step_tokens = step.bounds.most
        received, local_ids, weights, self._handle, _ = self._native.dispatch(
            x=step.tokens if step.scales is None else (step.tokens, step.scales),
            topk_idx=self._ids_for_native(step.ids),
            topk_weights=step.weights,
            num_experts=config.total_experts,
            num_max_tokens_per_rank=step.bounds.most,
            num_sms=config.max_sms,
            do_cpu_sync=False,
        )
        tokens, scales = rows_and_scales(received)
        # DeepEP's ids and sources past the received rows hold anything
        row = torch.arange(tokens.shape[0], device=self.device)
        total = self._handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
        sources = torch.where(row < total, self._global_tokens() // step.bounds.most, -1)
        ids = conversions.global_ids(local_ids, config.first_expert, step.pad_id)
        ids = conversions.padded_ids(ids, total, step.pad_id)
        return lib.ReceivedRows(tokens, scales, ids, weights, per_source=count_ids(sources, 0, config.world_size))

    def _global_tokens(self) -> torch.Tensor:
        """Returns each row's source, rank * step_tokens + token; anything past the received rows."""
        metadata: torch.Tensor = self._handle.recv_src_metadata
        return metadata[:, 0]

    def _positions(self) -> torch.Tensor:
        tokens = self._global_tokens()[: int(self._total_recv)]
        ranks, own_tokens = tokens // self._step_tokens, tokens % self._step_tokens
        return conversions.positions(ranks, own_tokens, self._position_stride)


class DeepEPV2All2AllManager(lib.LibraryAll2AllManager):
    """`deep_ep.ElasticBuffer` with do_cpu_sync=False."""

    backend = "deepep_v2"
    library = ELASTIC_BUFFER
    op_type = DeepEPV2Op
    capabilities = replace(
        COMPACT_ROWS,
        row_order="any",
        hidden_multiple=128,
        max_topk=32,
        notes=("an id may not stand twice in a token", "needs NCCL with device-side communication"),
    )
