"""EpDispatchCombineConfig, the configuration that every rank of a group builds an op from, and its checks."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch

from ep_a2a import env
from ep_a2a.config.enums import (
    COMBINE_QUANT_TYPES,
    DISPATCH_QUANT_TYPES,
    MX_GROUP_SIZE,
    RING_KERNEL_TYPES,
    CompiledCalls,
    EpDispatchCombineKernelType,
    Layout,
    OnRankLoss,
    QuantType,
    ScaleFormat,
)
from ep_a2a.config.requirements import checked_integer, checked_seconds, require
from ep_a2a.config.transports import INTERNODE_TRANSPORTS, check_internode_transport
from ep_a2a.errors import ConfigError, UnknownNameError, shown

WIRE_FORMAT_VERSION = 6
"""Ranks of different wire formats cannot exchange tokens. Each meeting of ranks and each config digest carries it."""

FP8_DTYPE = torch.float8_e4m3fn
FP8_GROUP_SIZE = 128
"""Elements that share one scale in 1x128 quantisation."""

GROUP_SIZES = {
    QuantType.FP8_PER_1X128: FP8_GROUP_SIZE,
    QuantType.MXFP8: MX_GROUP_SIZE,
    QuantType.FP8_STATIC: FP8_GROUP_SIZE,
    QuantType.FP8_BLOCKWISE: FP8_GROUP_SIZE,
}
"""Elements that a cast takes together, of which a row must have a multiple."""
SCALE_FORMATS = {QuantType.MXFP8: (ScaleFormat.UE8M0,), QuantType.FP8_STATIC: (ScaleFormat.FLOAT32,)}
"""Formats of scales that a cast inside dispatch can have, where not all."""

TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8_DTYPE)
COMBINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT_BYTES = 16
COLUMN_WORD_BYTES = 4
"""Bytes of an element of column_major_scales: a float32, or four exponents."""
MAX_TOPK = 32
MAX_TOKENS_PER_RANK = 1 << 24
MAX_MASKED_RANKS = 31
"""Ranks of which a word can mask each."""
LOW_LATENCY_MAX_TOKENS = 128
"""The most tokens of a rank in a low-latency dispatch, which has a slot for each."""
LOW_LATENCY_MAX_ROWS = 264
"""The most rows from all ranks in a low-latency dispatch: two programs on each of 132 multiprocessors. With more, bulk
dispatch is as fast or faster (bench/results)."""


def parse_enum(kind: type[enum.Enum], value: Any, field_name: str) -> Any:
    """Returns the member of `kind` that `value` is or names; raises UnknownNameError, which lists them, otherwise."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise UnknownNameError(f"to be one of {names}", shown(value), field=field_name) from None


@dataclass(frozen=True)
class EpDispatchCombineConfig:
    """Shapes and choices of one op. Names, order and defaults of the positional fields are MORI's.

    W = world_size, M = max_num_inp_token_per_rank, K = num_experts_per_token, E = num_experts_per_rank. All fields but
    `rank` and `num_experts_per_rank` must be equal on all ranks, which compare them when an op is built.

    Attributes:
        data_type: dtype of the tokens given to dispatch, before a fused cast.
        rank: this rank in the group, 0 <= rank < W.
        world_size: W, ranks in the group.
        hidden_dim: H, elements of one token row. A row is a multiple of 16 bytes.
        scale_dim: scales per token that travel with quantised tokens; 0 for none. Derived for a fused cast.
        scale_type_size: bytes per scale, 1 or 4. Derived for a fused cast.
        max_token_type_size: bytes of the widest element that dispatch or combine moves; sizes the buffers.
        max_num_inp_token_per_rank: M, the most tokens that any rank brings.
        num_experts_per_rank: E, experts on this rank.
        num_experts_per_token: K, 1 to 32.
        warp_num_per_block, block_num, rdma_block_num: launch numbers, used with launch="manual". Between nodes
            warps are fixed, and block_num bounds programs that exchange nothing.
        max_total_recv_tokens: cap on received rows (layout compact only), rounded up to a multiple of W as in MORI;
            0 = none.
        use_external_inp_buf: MORI's; without effect, since combine sends from any memory.
        kernel_type: kernels to use.
        gpu_per_node: ranks that share a node.
        num_qp_per_pe: MORI's queue pairs per peer; checked, without effect: NCCL and NVSHMEM have their own settings.
        quant_type: one of QuantType's values. fp8_per_token, fp8_per_1x128, mxfp8 and fp8_static cast inside dispatch;
            fp8_direct_cast and fp8_blockwise cast the rows that combine sends.
        layout: one of Layout's values.
        timeout_secs: seconds that a wait inside a kernel may take, or on CPU an exchange between nodes; None reads
            EP_A2A_TIMEOUT_SECS (default 30). docs/reliability.md has the bounds of other waits.
        first_timeout_secs: bound of the waits inside kernels in the first step after construction or reset, unless
            timeout_secs is longer; None reads EP_A2A_FIRST_TIMEOUT_SECS (default 300).
        num_experts: experts over all ranks; 0 = W * E. Owned linearly: the first num_experts % W ranks own one more.
        launch: "auto" computes launch numbers from the shape of each step, "manual" takes those of this config.
        max_sms: most multiprocessors that a launch may occupy; 0 = all. A launch with several roles takes 4 at least.
        dispatch_quant_type: the cast inside dispatch where quant_type names a combine cast; None = by quant_type.
        scale_format: one of ScaleFormat's values, for scales that a fused cast writes; "float32" where there is none.
            With mxfp8 it becomes "ue8m0".
        combine_dtype: dtype of the rows given to combine; None = data_type, or bfloat16 where that is fp8.
        flagged_max_tokens: steps of at most this step_tokens use low-latency dispatch, whose words are their own
            flags: one hop less, one local copy more. 0 to LOW_LATENCY_MAX_TOKENS, and LOW_LATENCY_MAX_ROWS / W at most.
        expert_alignment: in layout expert_major, rows of zeros follow an expert's rows up to a multiple of this, or to
            the end of its block, so that grouped products can read whole tiles. 1 in other layouts.
        column_major_scales: in layout expert_major, scales as DeepGEMM's masked products read them: [E, R, S], whose
            last two strides are 1 and R, rounded up to 16 bytes. Scales of a byte come four to an int32. False in other
            layouts and without scales.
        local_ids: received ids count this rank's experts from 0. Slots of other ranks' experts, and dropped slots, hold
            -1 and weight 0.
        compiled_calls: one of CompiledCalls' values; fewer forms of calls make an op's construction shorter.
        chunk_tokens: tokens whose rows travel to another node in one chunk.
        ring_chunks: chunks that a ring between nodes holds at most, a power of two. With launch="manual",
            rdma_block_num channels share the rings. Ranks must have equal numbers, so a call cannot change them.
        internode_transport: the transport between nodes, by name. With "auto" a manager reads
            EP_A2A_INTERNODE_TRANSPORT; an op that is built without a manager takes "peer_memory".
        on_rank_loss: what happens when a rank's process ends. "fail": every call raises until reset. "mask": the others
            go on without it; slots of its experts count as dropped. Of 31 ranks at most that reach each other's memory,
            and not in layout compact, where rows of each rank follow those of the ranks before it.
        mask_after_secs: with on_rank_loss="mask", seconds of a wait after which a rank that lives, and waits for nobody
            itself, is masked, too; not in an op's first two steps, nor where timeout_secs is no longer than this.
    """

    data_type: torch.dtype
    rank: int = field(metadata={"minimum": 0})
    world_size: int = field(metadata={"minimum": 1})
    hidden_dim: int = field(metadata={"minimum": 1})
    scale_dim: int = field(metadata={"minimum": 0})
    scale_type_size: int = field(metadata={"minimum": 0})
    max_token_type_size: int = field(metadata={"minimum": 1})
    max_num_inp_token_per_rank: int = field(metadata={"minimum": 1})
    num_experts_per_rank: int = field(metadata={"minimum": 0})
    num_experts_per_token: int = field(metadata={"minimum": 1})
    warp_num_per_block: int = field(default=8, metadata={"minimum": 1})
    block_num: int = field(default=80, metadata={"minimum": 1})
    max_total_recv_tokens: int = field(default=0, metadata={"minimum": 0})
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = field(default=8, metadata={"minimum": 1})
    rdma_block_num: int = field(default=0, metadata={"minimum": 0})
    num_qp_per_pe: int = field(default=1, metadata={"minimum": 1})
    quant_type: str = "none"
    _: KW_ONLY
    layout: str = "compact"
    timeout_secs: float | None = None
    first_timeout_secs: float | None = None
    num_experts: int = field(default=0, metadata={"minimum": 0})
    launch: str = "auto"
    max_sms: int = field(default=0, metadata={"minimum": 0})
    dispatch_quant_type: str | None = None
    scale_format: str = "float32"
    combine_dtype: torch.dtype | None = None
    flagged_max_tokens: int = field(default=LOW_LATENCY_MAX_TOKENS, metadata={"minimum": 0})
    expert_alignment: int = field(default=1, metadata={"minimum": 1})
    column_major_scales: bool = False
    local_ids: bool = False
    compiled_calls: str = "all"
    chunk_tokens: int = field(default=8, metadata={"minimum": 1})
    ring_chunks: int = field(default=4, metadata={"minimum": 1})
    internode_transport: str = "auto"
    on_rank_loss: str = "fail"
    mask_after_secs: float = 10.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if "minimum" in each.metadata:
                number = checked_integer(each.name, getattr(self, each.name), each.metadata["minimum"])
                object.__setattr__(self, each.name, number)
        for name in ("use_external_inp_buf", "column_major_scales", "local_ids"):
            value = getattr(self, name)
            require(isinstance(value, int) and value in (0, 1), name, "to be True or False", shown(value))
        require(self.rank < self.world_size, "rank", f"< world_size {self.world_size}", str(self.rank))
        require(self.topk <= MAX_TOPK, "num_experts_per_token", f"<= {MAX_TOPK}", str(self.topk))
        most = self.max_num_inp_token_per_rank
        require(most < MAX_TOKENS_PER_RANK, "max_num_inp_token_per_rank", f"< {MAX_TOKENS_PER_RANK}", str(most))
        last_position = self.world_size**2 * most
        require(last_position <= 1 << 31, None, "source positions below 2**31 = W * W * M", str(last_position))
        self._check_names()
        self._check_dtypes()
        self._check_experts()
        self._check_masks()
        for name in ("timeout_secs", "first_timeout_secs"):
            if getattr(self, name) is not None:
                checked_seconds(name, getattr(self, name))
        few = self.flagged_max_tokens
        require(few <= LOW_LATENCY_MAX_TOKENS, "flagged_max_tokens", f"<= {LOW_LATENCY_MAX_TOKENS}", str(few))
        if self.max_total_recv_tokens:
            expected = "'compact' with max_total_recv_tokens"
            require(self.layout == Layout.COMPACT, "layout", expected, repr(self.layout))

    def _check_names(self) -> None:
        if not isinstance(self.kernel_type, EpDispatchCombineKernelType):
            raise ConfigError("to be an EpDispatchCombineKernelType", shown(self.kernel_type), field="kernel_type")
        for kind, name in (
            (Layout, "layout"),
            (ScaleFormat, "scale_format"),
            (CompiledCalls, "compiled_calls"),
            (OnRankLoss, "on_rank_loss"),
        ):
            parse_enum(kind, getattr(self, name), name)
        quant_type = parse_enum(QuantType, self.quant_type, "quant_type")
        dispatch_quant = parse_enum(QuantType, self.dispatch_quant_type or quant_type, "dispatch_quant_type")
        if dispatch_quant == QuantType.MXFP8 and self.scale_format == ScaleFormat.FLOAT32:
            object.__setattr__(self, "scale_format", ScaleFormat.UE8M0.value)
        check_internode_transport(self.internode_transport, "internode_transport")
        if self.launch not in ("auto", "manual"):
            raise UnknownNameError("to be 'auto' or 'manual'", shown(self.launch), field="launch")
        if self.dispatch_quant_type is not None:
            dispatch = parse_enum(QuantType, self.dispatch_quant_type, "dispatch_quant_type")
            acts_on_dispatch = dispatch in DISPATCH_QUANT_TYPES
            require(acts_on_dispatch, "dispatch_quant_type", "to act on dispatch", repr(dispatch.value))
            acts_on_combine = quant_type in COMBINE_QUANT_TYPES or quant_type == dispatch
            expected = "to act on combine where dispatch_quant_type is given"
            require(acts_on_combine, "quant_type", expected, repr(quant_type.value))
        has_effect = self.casts_in_dispatch or self.scale_format == ScaleFormat.FLOAT32
        require(has_effect, None, f"a cast inside dispatch with scale_format {self.scale_format!r}", "none")

    def _check_masks(self) -> None:
        checked_seconds("mask_after_secs", self.mask_after_secs)
        if self.masks:
            most = f"<= {MAX_MASKED_RANKS} with on_rank_loss='mask'"
            layouts = "'rank_major' or 'expert_major' with on_rank_loss='mask'"
            require(self.layout != Layout.COMPACT, "layout", layouts, "'compact'")
            require(self.world_size <= MAX_MASKED_RANKS, "world_size", most, str(self.world_size))
            require(not self.uses_rings, "on_rank_loss", "'fail' between nodes", "'mask'")

    @functools.cached_property
    def masks(self) -> bool:
        """Whether ranks whose process ends are masked."""
        return self.on_rank_loss == OnRankLoss.MASK

    def _check_dtypes(self) -> None:
        require(self.data_type in TOKEN_DTYPES, "data_type", f"to be one of {TOKEN_DTYPES}", str(self.data_type))
        is_known = self.combined_dtype in COMBINE_DTYPES
        require(is_known, "combine_dtype", f"in {COMBINE_DTYPES}", str(self.combine_dtype))
        widest = max(self.data_type.itemsize, self.combined_dtype.itemsize)
        if self.combine_dtype is not None or self.data_type != FP8_DTYPE:
            size = self.max_token_type_size
            expected = f">= {widest}, the widest element to be moved"
            require(size >= widest, "max_token_type_size", expected, str(size))
        for dtype in (self.wire_dtype, self.combined_dtype, self.combine_wire_dtype):
            row_bytes = self.hidden_dim * dtype.itemsize
            expected = f"* {dtype.itemsize} bytes ({dtype}) to be a multiple of {ALIGNMENT_BYTES}"
            require(row_bytes % ALIGNMENT_BYTES == 0, "hidden_dim", expected, str(row_bytes))
        for quant in (self.dispatch_quant, self.combine_quant):
            group = GROUP_SIZES.get(quant, 1)
            expected = f"to be a multiple of {group} with {quant.value}"
            require(self.hidden_dim % group == 0, "hidden_dim", expected, str(self.hidden_dim))
        if self.casts_in_dispatch:
            require(self.data_type != FP8_DTYPE, "data_type", "before the fused cast (bf16, fp16 or fp32)", "fp8")
            possible = SCALE_FORMATS.get(self.dispatch_quant, tuple(ScaleFormat))
            expected = f"in {tuple(map(str, possible))} with {self.dispatch_quant.value}"
            require(self.scale_format in possible, "scale_format", expected, repr(str(self.scale_format)))
            given, made = (self.scale_dim, self.scale_type_size), (self.num_scales, self.scale_bytes)
            cast = self.dispatch_quant.value
            expected = f"0, or (scale_dim, scale_type_size) = {made} as {cast} makes them"
            require(self.scale_dim == 0 or given == made, "scale_dim", expected, str(given))
        if self.scale_dim:
            require(self.scale_type_size in (1, 4), "scale_type_size", "to be 1 or 4", str(self.scale_type_size))

    def _check_experts(self) -> None:
        require(self.total_experts > 0, None, "at least one expert in all", "none")
        own = self.num_local_experts
        most = num_owned_experts(self.total_experts, self.world_size, 0)
        require(
            self.num_experts_per_rank in (own, most),
            "num_experts_per_rank",
            f"to be {own} (linear ownership of {self.total_experts} experts by rank {self.rank})",
            str(self.num_experts_per_rank),
        )
        has_effect = self.layout == Layout.EXPERT_MAJOR or self.expert_alignment == 1
        expected = f"'expert_major' with expert_alignment {self.expert_alignment}"
        require(has_effect, "layout", expected, repr(self.layout))
        if self.column_major_scales:
            expected = "'expert_major' with column_major_scales"
            require(self.layout == Layout.EXPERT_MAJOR, "layout", expected, repr(self.layout))
            num_bytes = self.num_scales * self.scale_bytes
            is_whole = num_bytes > 0 and num_bytes % COLUMN_WORD_BYTES == 0
            expected = f"scales that fill words of {COLUMN_WORD_BYTES} bytes with column_major_scales"
            require(is_whole, None, expected, f"{num_bytes} bytes")
        if self.layout == Layout.EXPERT_MAJOR:
            num_rows = most * self.world_size * self.max_num_inp_token_per_rank
            require(num_rows <= 1 << 31, None, "at most 2**31 rows E * W * M in layout expert_major", str(num_rows))

    @functools.cached_property
    def topk(self) -> int:
        """K."""
        return self.num_experts_per_token

    @functools.cached_property
    def total_experts(self) -> int:
        """Experts over all ranks; ids outside [0, total_experts) are dropped slots."""
        return self.num_experts or self.world_size * self.num_experts_per_rank

    @functools.cached_property
    def num_local_experts(self) -> int:
        """Experts that this rank owns."""
        return num_owned_experts(self.total_experts, self.world_size, self.rank)

    @functools.cached_property
    def first_expert(self) -> int:
        """The id of the first expert that this rank owns, or would own."""
        small, num_large = divmod(self.total_experts, self.world_size)
        return self.rank * small + min(self.rank, num_large)

    @functools.cached_property
    def first_received_id(self) -> int:
        """The id of this rank's first expert among the ids that it receives."""
        return 0 if self.local_ids else self.first_expert

    @functools.cached_property
    def dispatch_quant(self) -> QuantType:
        """The cast inside dispatch."""
        if self.dispatch_quant_type is not None:
            return QuantType(self.dispatch_quant_type)
        quant_type = QuantType(self.quant_type)
        return quant_type if quant_type in DISPATCH_QUANT_TYPES else QuantType.NONE

    @functools.cached_property
    def combine_quant(self) -> QuantType:
        """The cast on the combine wire."""
        quant_type = QuantType(self.quant_type)
        return quant_type if quant_type in COMBINE_QUANT_TYPES else QuantType.NONE

    @functools.cached_property
    def casts_in_dispatch(self) -> bool:
        """Whether dispatch turns data_type into fp8."""
        return self.dispatch_quant != QuantType.NONE

    @functools.cached_property
    def takes_scale(self) -> bool:
        """Whether a dispatch that casts is given the cast's scale."""
        return self.dispatch_quant == QuantType.FP8_STATIC

    @functools.cached_property
    def cast_group(self) -> int:
        """Elements that the cast inside dispatch takes together; those that share a scale, where it computes scales."""
        return GROUP_SIZES.get(self.dispatch_quant, self.hidden_dim)

    @functools.cached_property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the rows that dispatch returns."""
        return FP8_DTYPE if self.casts_in_dispatch else self.data_type

    @functools.cached_property
    def combined_dtype(self) -> torch.dtype:
        """Dtype of the rows given to combine and of its result."""
        if self.combine_dtype is not None:
            return self.combine_dtype
        return torch.bfloat16 if self.data_type == FP8_DTYPE else self.data_type

    @functools.cached_property
    def num_scales(self) -> int:
        """Scales per row that dispatch returns; 0 = none."""
        if self.takes_scale:
            return 0
        return self.hidden_dim // self.cast_group if self.casts_in_dispatch else self.scale_dim

    @functools.cached_property
    def scale_bytes(self) -> int:
        """Bytes per scale that dispatch returns."""
        if self.casts_in_dispatch:
            return 1 if self.scale_format == ScaleFormat.UE8M0 else 4
        return self.scale_type_size

    @functools.cached_property
    def combine_wire_dtype(self) -> torch.dtype:
        """Dtype of the rows that combine sends."""
        return self.combined_dtype if self.combine_quant == QuantType.NONE else FP8_DTYPE

    @functools.cached_property
    def num_combine_scales(self) -> int:
        """Float32 scales that combine sends with a row; 0 = none."""
        return self.hidden_dim // FP8_GROUP_SIZE if self.combine_quant == QuantType.FP8_BLOCKWISE else 0

    @functools.cached_property
    def uses_rings(self) -> bool:
        """Whether tokens travel between nodes in rings of chunks."""
        return self.kernel_type in RING_KERNEL_TYPES

    @functools.cached_property
    def is_staged(self) -> bool:
        """Whether the host moves blocks between nodes that kernels have packed (the staged all-to-all)."""
        return self.uses_rings and INTERNODE_TRANSPORTS[self.internode_transport] is not None

    @functools.cached_property
    def low_latency_tokens(self) -> int:
        """The largest step_tokens of a step that takes the low-latency dispatch."""
        if self.uses_rings:
            return 0
        most = max(1, LOW_LATENCY_MAX_ROWS // self.world_size)
        return min(self.flagged_max_tokens, self.max_num_inp_token_per_rank, most)

    @functools.cached_property
    def max_num_recv_tokens_per_rank(self) -> int:
        """Rows kept per source on average: M, or MORI's share of the cap, min(ceil(cap / W), M)."""
        if not self.max_total_recv_tokens:
            return self.max_num_inp_token_per_rank
        return min(math.ceil(self.max_total_recv_tokens / self.world_size), self.max_num_inp_token_per_rank)

    @functools.cached_property
    def max_num_recv_tokens(self) -> int:
        """R, the most rows that dispatch returns."""
        return self.world_size * self.max_num_recv_tokens_per_rank

    @functools.cached_property
    def max_num_expert_rows(self) -> int:
        """The most rows that the experts work on: R, or in layout expert_major E * W * M."""
        return self.max_num_recv_tokens * (self.num_local_experts if self.layout == Layout.EXPERT_MAJOR else 1)

    def column_rows(self, num_rows: int) -> int:
        """Rows that a column of column_major_scales has room for: num_rows, rounded up to ALIGNMENT_BYTES."""
        multiple = ALIGNMENT_BYTES // COLUMN_WORD_BYTES
        return -(-num_rows // multiple) * multiple

    @property
    def timeout(self) -> float:
        """Seconds that a wait for other ranks may take."""
        return env.TIMEOUT_SECS.get() if self.timeout_secs is None else self.timeout_secs

    @property
    def first_timeout(self) -> float:
        """Seconds that a wait inside a kernel may take in an op's first step."""
        first = env.FIRST_TIMEOUT_SECS.get() if self.first_timeout_secs is None else self.first_timeout_secs
        return max(first, self.timeout)

    def shared_fields(self) -> dict[str, str]:
        """Returns the fields that must be equal on all ranks, as text by name."""
        own = ("rank", "num_experts_per_rank")
        shared = {f.name: _text(getattr(self, f.name)) for f in fields(self) if f.name not in own}
        resolved = {"num_experts": self.total_experts, "timeout_secs": self.timeout}
        resolved |= {"first_timeout_secs": self.first_timeout, "wire_format_version": WIRE_FORMAT_VERSION}
        return shared | {name: str(value) for name, value in resolved.items()}

    def digest(self) -> str:
        """Short hash of `shared_fields()`, equal on all ranks that may work together."""
        return hashlib.sha256(json.dumps(self.shared_fields(), sort_keys=True).encode()).hexdigest()[:16]


def num_owned_experts(num_experts: int, world_size: int, rank: int) -> int:
    """Experts of `rank` under vLLM's linear ownership: the first `num_experts % world_size` ranks own one more.

    Raises:
        ConfigError: num_experts is no number, or below 0.
    """
    checked_integer("num_experts", num_experts, 0)
    return num_experts // world_size + (rank < num_experts % world_size)


def _text(value: Any) -> str:
    return str(value.value) if isinstance(value, enum.Enum) else str(value)
