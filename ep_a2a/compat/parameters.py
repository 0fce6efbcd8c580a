"""The table of parameters that do not act here as in the library whose interface they belong to.

The modules of ep_a2a.compat take the texts of their warnings and refusals from here, and docs/arguments.md prints all.
"""

from __future__ import annotations

import enum
import functools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ep_a2a import env

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


class Effect(enum.StrEnum):
    """The effect that a parameter has on the call that takes it.

    NONE: the call ignores the parameter, and serves its caller with every value.
    WARNED: the call ignores the parameter, and warns once per process of a value other than the default.
    REFUSED: the call raises an error with a remedy.
    """

    NONE = "no effect"
    WARNED = "warned of once"
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """Parameters of one or more callables that share one effect.

    Attributes:
        parameters: names, separated by spaces; "" = all parameters of the callable.
        effect: the effect that they have.
        when: the values that the effect concerns; "" = all.
        text: the reason, or the remedy of a refusal.
        library: package below ep_a2a.compat.
        callables: names below that package, separated by spaces.
    """

    parameters: str
    effect: Effect
    when: str
    text: str
    library: str = ""
    callables: str = ""


def ignored(parameters: str, text: str, when: str = "") -> Row:
    """Parameters that the call ignores; it serves its caller with every value."""
    return Row(parameters, Effect.NONE, when, text)


def warned(parameters: str, when: str, text: str) -> Row:
    """Parameters that the call ignores, with a warning."""
    return Row(parameters, Effect.WARNED, when, text)


def refused(parameters: str, when: str, text: str) -> Row:
    """Parameters of which the call refuses these values."""
    return Row(parameters, Effect.REFUSED, when, text)


NEW_GROUP = "If a rank does not come, the others get a RankTimeoutError; then make a new group and buffer."
NO_STATISTICS = "Leave it out; ep_a2a.telemetry.counters counts an op's waits as a whole."
OP, OPS = "ops.EpDispatchCombineOp", "ops.dispatch_combine"
ROUTING = "Dispatch the tokens again; the routing of a step is kept on the device until its combine."
BY_GROUP = "Make a torch.distributed group, register it, and call shmem_torch_process_group_init(name)."
BY_LAYOUT = 'Build the op with EpDispatchCombineConfig(..., layout="expert_major"): dispatch and combine do it then.'
BY_MALLOC = "Use shmem_malloc or mori_shmem_create_tensor, and copy."
BY_ADDRESS = "Pass shmem_ptr_p2p(tensor.data_ptr(), my_pe, peer) to a kernel."
OWN_TOOLS = "Use ep_a2a's own tools: `ep-a2a bench`, or EP_A2A_COUNTERS in vLLM."
BY_MANAGER = "Across nodes use the manager's ops: get_ep_group().device_communicator.all2all_manager.get_handle(...)."
LAYER = "EPLowLatencyAllToAllLayer"

PARAMETERS: dict[str, dict[str, list[Row]]] = {
    "deep_ep": {
        "Buffer": [
            warned("num_nvl_bytes num_rdma_bytes", "> 0", "Each op allocates what it needs; see `ep-a2a plan`."),
            warned("num_qps_per_rank", "other than 24", "Inside a node there are no queue pairs."),
            warned("allow_nvlink_for_low_latency_mode", "False", "Ranks of a node write to each other's memory."),
            warned("allow_mnnvl use_fabric", "True", "A buffer is inside one node."),
            ignored("low_latency_mode", "Both modes can always be called."),
            refused("enable_shrink", "True", f"Leave it out. {NEW_GROUP}"),
            refused("comm", "without group", "Pass group."),
        ],
        "Buffer.get_dispatch_layout Buffer.dispatch Buffer.combine": [
            ignored("allocate_on_comm_stream", "Results may be used on both streams."),
        ],
        "Buffer.dispatch": [
            ignored("num_tokens_per_rank", "is_token_in_rank holds these numbers. The argument must still be given."),
            ignored("num_tokens_per_rdma_rank", "A buffer is inside one node."),
            ignored(
                "is_token_in_rank num_tokens_per_expert expert_alignment num_worst_tokens",
                "The routing of the handle is repeated.",
                "with a handle",
            ),
        ],
        "Config": [
            ignored(
                "num_max_nvl_chunked_send_tokens num_max_nvl_chunked_recv_tokens "
                "num_max_rdma_chunked_send_tokens num_max_rdma_chunked_recv_tokens",
                "The kernels have no chunks. Size hints use these numbers.",
                "in calls",
            ),
        ],
        "Buffer.get_low_latency_rdma_size_hint": [ignored("num_ranks", "DeepEP's formula does not use it.")],
        "Buffer.low_latency_dispatch": [refused("dispatch_wait_recv_cost_stats", "not None", NO_STATISTICS)],
        "Buffer.low_latency_combine": [
            refused("combine_wait_recv_cost_stats", "not None", NO_STATISTICS),
            refused("use_logfmt", "True", "Leave use_logfmt out."),
        ],
        "Buffer.clean_low_latency_buffer": [ignored("", "Calls of both modes need no cleaned memory.")],
    },
    "mori": {
        "ops.EpDispatchCombineConfig": [
            warned(
                "block_num warp_num_per_block rdma_block_num",
                'not default, without launch="manual"',
                'Tuned tables decide; launch="manual" takes these numbers. Between nodes the warps are fixed.',
            ),
            warned("num_qp_per_pe", "other than 1", "NCCL and NVSHMEM have settings of their own."),
            warned(
                "kernel_type",
                "other than IntraNode, on one node",
                "On one node all kernel types run as IntraNode, which has their calls and results.",
            ),
            ignored("gpu_per_node", "The ranks' hosts decide the nodes.", "with IntraNode, IntraNodeLL and AsyncLL"),
        ],
        f"{OP}.dispatch {OP}.combine {OP}.get_launch_config": [
            warned("rdma_block_num", "> 0", "Only the config sets channels between nodes, equal on all ranks."),
        ],
        f"{OP}.dispatch_send {OP}.dispatch_recv {OP}.combine_send {OP}.combine_recv": [
            warned("block_num warp_per_block", "> 0", "Split calls take the op's own launch numbers."),
        ],
        f"{OP}.combine {OP}.combine_send": [
            warned(
                "weights",
                "this rank's own",
                "Weights of combine are in the order of the received rows; no sums of weights are returned.",
            ),
            warned("indices", "those that dispatch returned", "Combine knows where the received rows go."),
            ignored("input", "Rows come from the registered buffer, if it was asked for.", "without external buffer"),
        ],
        f"{OP}.dispatch": [
            refused("routing", "not None", ROUTING),
            refused("return_routing", "True", ROUTING),
        ],
        f"{OP}.combine": [
            ignored("call_reset", "An op without an error needs no reset, as in MORI."),
            refused("routing", "not None", ROUTING),
        ],
        f"{OPS}.warmup_jit_kernels": [ignored("", "An op compiles its kernels when it is built.")],
        "shmem.shmem_malloc_align": [
            refused("alignment", "> 256", "Align within a larger allocation; each starts at a multiple of 256."),
        ],
        "shmem.symm_mori_shmem_tensor": [refused("peer", "another rank", BY_ADDRESS)],
    },
    "triton_distributed": {
        f"{LAYER} create_ep_ll_a2a_ctx": [
            refused("local_world_size", "other than world_size", BY_MANAGER),
            ignored("fp8_gsize", "Only scales have groups.", "where tokens have no scales"),
        ],
        f"{LAYER}.combine": [
            ignored("send_tokens", "Rows are taken from combine_ctx.send_tokens_comm_buf.", "with zero_copy"),
        ],
        f"{LAYER}.dump_dispatch_trace {LAYER}.dump_combine_trace": [
            ignored("folder", "There are no spans to write; the call returns None.", "without enable_profiling"),
        ],
    },
}
"""By library and callables, the parameters that do not act as in the library; "" = the callable as a whole."""

UNSUPPORTED = {
    "deep_ep": {
        "Buffer.low_latency_update_mask_buffer": NEW_GROUP,
        "Buffer.low_latency_query_mask_buffer": NEW_GROUP,
        "Buffer.low_latency_clean_mask_buffer": NEW_GROUP,
        "Buffer.get_local_buffer_tensor": "Use what dispatch returns, or get_next_low_latency_combine_buffer.",
    },
    "mori": {
        f"{OPS}.EpDispatchRoutingHandle": ROUTING,
        f"{OPS}.EpDispatchRoutingHandle.tensors": ROUTING,
        f"{OPS}.EpDispatchRoutingHandle.from_tensors": ROUTING,
        f"{OP}.dispatch_standard_moe": BY_LAYOUT,
        f"{OP}.combine_standard_moe": BY_LAYOUT,
        f"{OP}.convert_dispatch_output": BY_LAYOUT,
        f"{OP}.convert_combine_input": BY_LAYOUT,
        f"{OP}.get_debug_time_buf": OWN_TOOLS,
        f"{OP}.get_debug_time_offset": OWN_TOOLS,
        "ops.launch_local_expert_count": "Pass call_local_expert_count=True to dispatch; read op.local_expert_count.",
        "shmem.shmem_mpi_init": BY_GROUP,
        "shmem.shmem_get_unique_id": BY_GROUP,
        "shmem.shmem_init_attr": BY_GROUP,
        "shmem.shmem_module_init": "Kernels write to peers over shmem_ptr_p2p's addresses; no library is to be set up.",
        "shmem.shmem_barrier_on_stream": "Synchronise the stream and call shmem_barrier_all().",
        "shmem.shmem_ext_malloc_with_flags": "Use shmem_malloc(size).",
        "shmem.shmem_buffer_register": BY_MALLOC,
        "shmem.shmem_buffer_deregister": BY_MALLOC,
        "shmem.shmem_num_qp_per_pe": "Nodes are joined by torch.distributed, whose library has its own settings.",
        "shmem.MoriShmemBuffer": "Use mori_shmem_create_tensor.",
        "shmem.mori_shmem_create_tensor_list_intra_node": BY_ADDRESS,
    },
}
"""By library and callable, the remedy of calls that always raise UnsupportedError."""


def _all_rows() -> Iterator[Row]:
    for library, by_callables in PARAMETERS.items():
        for callables, rows in by_callables.items():
            yield from (replace(row, library=library, callables=callables) for row in rows)
        by_remedy: dict[str, list[str]] = {}
        for name, remedy in UNSUPPORTED.get(library, {}).items():
            by_remedy.setdefault(remedy, []).append(name)
        for remedy, names in by_remedy.items():
            yield Row("", Effect.REFUSED, "", remedy, library, " ".join(names))


ROWS = tuple(_all_rows())


def row_of(library: str, function: str, parameter: str = "") -> Row:
    """Returns the row that warns of or refuses a parameter.

    Args:
        library: package below ep_a2a.compat.
        function: name below that package.
        parameter: its parameter; "" where the whole callable is refused.

    Raises:
        KeyError: there is none.
    """
    acting = (row for row in ROWS if row.library == library and row.effect is not Effect.NONE)
    for row in acting:
        if function in row.callables.split() and parameter in (row.parameters.split() or [""]):
            return row
    raise KeyError((library, function, parameter))


def remedy_of(library: str, function: str, parameter: str = "") -> str:
    """Returns the remedy of a refusal; see `row_of` for the arguments."""
    return row_of(library, function, parameter).text


@functools.cache
def warn_of_variables(library: str, names: tuple[str, ...]) -> None:
    """Warns once per process of a library's environment variables, which nothing here reads; () = no warning."""
    if names:
        logger.warning(
            "%s on ep_a2a: %s have no effect. docs/env.md lists the variables that do, such as %s for network devices.",
            library,
            ", ".join(names),
            env.RDMA_DEVICES.name,
        )


@functools.cache
def warn_once(library: str, function: str, *parameters: str) -> None:
    """Warns once per process that a callable makes no use of parameters it was given.

    Args:
        library: package below ep_a2a.compat.
        function: name below that package.
        parameters: those that were given.
    """
    if not parameters:
        return
    texts = dict.fromkeys(row_of(library, function, each).text for each in parameters)
    logger.warning(
        "%s on ep_a2a: %s makes no use of %s. %s docs/arguments.md lists such arguments.",
        library,
        function,
        ", ".join(parameters),
        " ".join(texts),
    )
