"""The enumerations of the configuration, and which kernel serves which nodes. Needs no torch."""

import enum


class EpDispatchCombineKernelType(enum.Enum):
    """Kernels that move the tokens, by MORI's names and values.

    IntraNode: all ranks on one node.
    InterNode: several nodes; every rank writes to every other rank.
    InterNodeV1: several nodes; a token crosses once per node, through rings of a few chunks.
    InterNodeV1LL: the same for few tokens; a ring holds a whole step.
    AsyncLL: as InterNodeV1LL.
    IntraNodeLL: refused, since IntraNode takes few tokens the low-latency way by itself.
    """

    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4
    IntraNodeLL = 5


RING_KERNEL_TYPES = (
    EpDispatchCombineKernelType.InterNodeV1,
    EpDispatchCombineKernelType.InterNodeV1LL,
    EpDispatchCombineKernelType.AsyncLL,
)
"""Kernel types that send a token once to each other node, through rings of chunks."""
WHOLE_RING_KERNEL_TYPES = RING_KERNEL_TYPES[1:]
"""Ring kernel types for few tokens: a ring holds a whole step, one chunk per channel, one line per token."""


class QuantType(enum.StrEnum):
    """Quantisation of tokens on the wire, by MORI's and our names.

    NONE: tokens travel as they are.
    FP8_PER_TOKEN: dispatch casts to fp8, one scale per token.
    FP8_PER_1X128: dispatch casts to fp8, one scale per 128 elements.
    MXFP8: dispatch casts to fp8, one UE8M0 scale per 32 elements (OCP MX's format).
    FP8_STATIC: dispatch casts to fp8 with a scale that its caller passes; no scales travel. hidden_dim is a multiple of
        128.
    FP8_DIRECT_CAST: combine casts to fp8 without scales; values beyond 448 become 448.
    FP8_BLOCKWISE: combine casts to fp8, one float32 scale per 128 elements.
    """

    NONE = "none"
    FP8_PER_TOKEN = "fp8_per_token"
    FP8_PER_1X128 = "fp8_per_1x128"
    MXFP8 = "mxfp8"
    FP8_STATIC = "fp8_static"
    FP8_DIRECT_CAST = "fp8_direct_cast"
    FP8_BLOCKWISE = "fp8_blockwise"


MX_GROUP_SIZE = 32
"""Elements that share one scale in MXFP8."""
DISPATCH_QUANT_TYPES = (
    QuantType.NONE,
    QuantType.FP8_PER_TOKEN,
    QuantType.FP8_PER_1X128,
    QuantType.MXFP8,
    QuantType.FP8_STATIC,
)
COMBINE_QUANT_TYPES = (QuantType.NONE, QuantType.FP8_DIRECT_CAST, QuantType.FP8_BLOCKWISE)


class Layout(enum.StrEnum):
    """Arrangement of received rows.

    COMPACT: `[R, H]`, rows dense over all sources, ascending by (source rank, source token).
    RANK_MAJOR: `[W, step_tokens, H]`, source s's rows dense from the front of block s. `[R, H]` with a bound for each
        rank, source s's rows dense from the sum of earlier bounds.
    EXPERT_MAJOR: `[E, R, H]`, the rows of each local expert dense from the front of its block, again
        ascending by (source rank, source token); combine multiplies by the weights and adds.
    """

    COMPACT = "compact"
    RANK_MAJOR = "rank_major"
    EXPERT_MAJOR = "expert_major"


class ScaleFormat(enum.StrEnum):
    """Format of the scales that a fused fp8 cast writes.

    FLOAT32: float32. UE8M0: rounded up to a power of two, of which the exponent byte is written.
    FLOAT32_POWER_OF_TWO: rounded up likewise and written as float32, as vLLM does for DeepGEMM.
    """

    FLOAT32 = "float32"
    UE8M0 = "ue8m0"
    FLOAT32_POWER_OF_TWO = "float32_power_of_two"


class OnRankLoss(enum.StrEnum):
    """What happens to an op when the process of another rank ends.

    FAIL: calls raise until reset. MASK: the other ranks go on without it.
    """

    FAIL = "fail"
    MASK = "mask"


class CompiledCalls(enum.StrEnum):
    """Forms of calls that are compiled when an op is built. Other forms compile at their first call, before a capture.

    ALL: all whole calls.
    SERVING: the calls of an engine's layers: dispatch with weights, and with scales where the config has them and does
        not make them; combine without weights and indices.
    """

    ALL = "all"
    SERVING = "serving"


WHOLE_STEP_MAX_TOKENS = 512
"""The largest M whose rings between nodes hold a whole step (bench/results/2026-11-23_h200x2_nodes.md)."""


def inter_node_kernel(max_tokens: int) -> EpDispatchCombineKernelType:
    """Returns the kernel for steps of at most M tokens on several nodes. Not measured on a network."""
    if isinstance(max_tokens, int) and max_tokens <= WHOLE_STEP_MAX_TOKENS:
        return EpDispatchCombineKernelType.InterNodeV1LL
    return EpDispatchCombineKernelType.InterNodeV1


def picked_kernel(num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
    """Returns the name of the kernel that an op gets, and why.

    Args:
        num_nodes: nodes of the group.
        max_tokens: M, the most tokens that a rank of the op may bring; None names every possible kernel.
    """
    if num_nodes == 1:
        return EpDispatchCombineKernelType.IntraNode.name, "all ranks on one node"
    hops = f"{num_nodes} nodes: one hop between them, one inside"
    few, many = EpDispatchCombineKernelType.InterNodeV1LL.name, EpDispatchCombineKernelType.InterNodeV1.name
    if max_tokens is None:
        return f"{few} or {many}", f"{hops}; {few} for ops of at most {WHOLE_STEP_MAX_TOKENS} tokens of a rank"
    picked = inter_node_kernel(max_tokens).name
    bound = "at most" if picked == few else "more than"
    return picked, f"{hops}; ops of {max_tokens} tokens of a rank are {bound} {WHOLE_STEP_MAX_TOKENS}"
