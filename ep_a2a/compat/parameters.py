"""The table of parameters that do not act here as in the library whose interface they belong to.

The modules of ep_a2a.compat take the texts of their warnings and refusals from here, and docs/arguments.md prints all.
"""

from __future__ import annotations

import enum
import functools
import logging
from dataclasses import dataclass

from ep_a2a import env

logger = logging.getLogger(__name__)


class Effect(enum.StrEnum):
    """The effect that a parameter has on the call that takes it.

    NONE: the call ignores the parameter, and does what its caller wants with every value.
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
        library: package below ep_a2a.compat.
        callables: names below that package, separated by spaces.
        parameters: names, separated by spaces; "" = all parameters of the callable.
        effect: what the call does.
        when: the values that the effect concerns; "" = all.
        text: the reason, or the remedy of a refusal.
    """

    library: str
    callables: str
    parameters: str
    effect: Effect
    when: str
    text: str


NONE, WARNED, REFUSED = Effect

DEEP_EP = (
    Row(
        "deep_ep",
        "Buffer",
        "num_nvl_bytes num_rdma_bytes",
        WARNED,
        "> 0",
        "Each op allocates what it needs; `ep-a2a plan` says how much.",
    ),
    Row("deep_ep", "Buffer", "num_qps_per_rank", WARNED, "other than 24", "Inside a node there are no queue pairs."),
    Row(
        "deep_ep",
        "Buffer",
        "allow_nvlink_for_low_latency_mode",
        WARNED,
        "False",
        "Ranks of a node always write to each other's memory.",
    ),
    Row("deep_ep", "Buffer", "allow_mnnvl use_fabric", WARNED, "True", "A buffer is inside one node."),
    Row("deep_ep", "Buffer", "low_latency_mode", NONE, "", "Both modes can always be called."),
    Row(
        "deep_ep",
        "Buffer",
        "enable_shrink",
        REFUSED,
        "True",
        "Leave it out. If a rank does not come, the others get a RankTimeoutError; then make a new group and buffer.",
    ),
    Row("deep_ep", "Buffer", "comm", REFUSED, "without group", "Pass group."),
    Row(
        "deep_ep",
        "Buffer.low_latency_update_mask_buffer Buffer.low_latency_query_mask_buffer "
        "Buffer.low_latency_clean_mask_buffer",
        "",
        REFUSED,
        "",
        "If a rank does not come, the others get a RankTimeoutError; then make a new group and buffer.",
    ),
    Row(
        "deep_ep",
        "Buffer.get_local_buffer_tensor",
        "",
        REFUSED,
        "",
        "Use the tensors that dispatch returns, or get_next_low_latency_combine_buffer.",
    ),
    Row("deep_ep", "Buffer.clean_low_latency_buffer", "", NONE, "", "Calls of both modes need no cleaned memory."),
    Row(
        "deep_ep",
        "Buffer.get_dispatch_layout Buffer.dispatch Buffer.combine",
        "allocate_on_comm_stream",
        NONE,
        "",
        "Results may be used on both streams.",
    ),
    Row(
        "deep_ep",
        "Buffer.dispatch",
        "num_tokens_per_rank",
        NONE,
        "",
        "is_token_in_rank holds these numbers. The argument must still be given.",
    ),
    Row("deep_ep", "Buffer.dispatch", "num_tokens_per_rdma_rank", NONE, "", "A buffer is inside one node."),
    Row(
        "deep_ep",
        "Buffer.dispatch",
        "is_token_in_rank num_tokens_per_expert expert_alignment num_worst_tokens",
        NONE,
        "with a handle",
        "The routing of the handle is repeated.",
    ),
    Row(
        "deep_ep",
        "Config",
        "num_max_nvl_chunked_send_tokens num_max_nvl_chunked_recv_tokens "
        "num_max_rdma_chunked_send_tokens num_max_rdma_chunked_recv_tokens",
        NONE,
        "in calls",
        "The kernels have no chunks. Size hints use these numbers.",
    ),
    Row("deep_ep", "Buffer.get_low_latency_rdma_size_hint", "num_ranks", NONE, "", "DeepEP's formula does not use it."),
    Row(
        "deep_ep",
        "Buffer.low_latency_dispatch",
        "dispatch_wait_recv_cost_stats",
        REFUSED,
        "not None",
        "Leave it out; ep_a2a.telemetry.counters counts an op's waits as a whole.",
    ),
    Row(
        "deep_ep",
        "Buffer.low_latency_combine",
        "combine_wait_recv_cost_stats",
        REFUSED,
        "not None",
        "Leave it out; ep_a2a.telemetry.counters counts an op's waits as a whole.",
    ),
    Row("deep_ep", "Buffer.low_latency_combine", "use_logfmt", REFUSED, "True", "Leave use_logfmt out."),
)

OP, OPS = "ops.EpDispatchCombineOp", "ops.dispatch_combine"
ROUTING = "Dispatch the tokens again; the routing of a step is kept on the device until its combine."
BY_GROUP = "Make a torch.distributed group, register it, and call shmem_torch_process_group_init(name)."
BY_MALLOC = "Use shmem_malloc or mori_shmem_create_tensor, and copy."
BY_ADDRESS = "Pass shmem_ptr_p2p(tensor.data_ptr(), my_pe, peer) to a kernel."

MORI = (
    Row(
        "mori",
        "ops.EpDispatchCombineConfig",
        "block_num warp_num_per_block rdma_block_num",
        WARNED,
        'not default, without launch="manual"',
        'Tuned tables decide; launch="manual" takes these numbers. Between nodes the warps are fixed.',
    ),
    Row(
        "mori",
        "ops.EpDispatchCombineConfig",
        "num_qp_per_pe",
        WARNED,
        "other than 1",
        "NCCL and NVSHMEM have settings of their own.",
    ),
    Row(
        "mori",
        "ops.EpDispatchCombineConfig",
        "kernel_type",
        WARNED,
        "other than IntraNode, on one node",
        "On one node all kernel types run as IntraNode, which has their calls and results.",
    ),
    Row(
        "mori",
        "ops.EpDispatchCombineConfig",
        "gpu_per_node",
        NONE,
        "with IntraNode, IntraNodeLL and AsyncLL",
        "The ranks' hosts decide the nodes.",
    ),
    Row(
        "mori",
        f"{OP}.dispatch {OP}.combine {OP}.get_launch_config",
        "rdma_block_num",
        WARNED,
        "> 0",
        "Channels between nodes are equal on all ranks, so only the config sets their number.",
    ),
    Row(
        "mori",
        f"{OP}.dispatch_send {OP}.dispatch_recv {OP}.combine_send {OP}.combine_recv",
        "block_num warp_per_block",
        WARNED,
        "> 0",
        "Split calls take the op's own launch numbers.",
    ),
    Row(
        "mori",
        f"{OP}.combine {OP}.combine_send",
        "weights",
        WARNED,
        "this rank's own",
        "Weights of combine are in the order of the received rows; no sums of weights are returned.",
    ),
    Row(
        "mori",
        f"{OP}.combine {OP}.combine_send",
        "indices",
        WARNED,
        "those that dispatch returned",
        "Combine knows where the received rows go.",
    ),
    Row(
        "mori",
        f"{OP}.combine {OP}.combine_send",
        "input",
        NONE,
        "without external buffer",
        "Rows are taken from the registered buffer, if it was ever asked for.",
    ),
    Row("mori", f"{OP}.combine", "call_reset", NONE, "", "An op without an error needs no reset, as in MORI."),
    Row("mori", f"{OP}.dispatch {OP}.combine", "routing", REFUSED, "not None", ROUTING),
    Row("mori", f"{OP}.dispatch", "return_routing", REFUSED, "True", ROUTING),
    Row(
        "mori",
        f"{OPS}.EpDispatchRoutingHandle {OPS}.EpDispatchRoutingHandle.tensors "
        f"{OPS}.EpDispatchRoutingHandle.from_tensors",
        "",
        REFUSED,
        "",
        ROUTING,
    ),
    Row(
        "mori",
        f"{OP}.dispatch_standard_moe {OP}.combine_standard_moe {OP}.convert_dispatch_output {OP}.convert_combine_input",
        "",
        REFUSED,
        "",
        'Build the op with EpDispatchCombineConfig(..., layout="expert_major"): dispatch and combine do it then.',
    ),
    Row(
        "mori",
        f"{OP}.get_debug_time_buf {OP}.get_debug_time_offset",
        "",
        REFUSED,
        "",
        "Use ep_a2a's own tools: `ep-a2a bench`, or EP_A2A_COUNTERS in vLLM.",
    ),
    Row(
        "mori",
        "ops.launch_local_expert_count",
        "",
        REFUSED,
        "",
        "Pass call_local_expert_count=True to dispatch and read op.local_expert_count.",
    ),
    Row("mori", f"{OPS}.warmup_jit_kernels", "", NONE, "", "An op compiles its kernels when it is built."),
    Row(
        "mori",
        "shmem.shmem_malloc_align",
        "alignment",
        REFUSED,
        "> 256",
        "Align within a larger allocation; each starts at a multiple of 256.",
    ),
    Row("mori", "shmem.shmem_mpi_init shmem.shmem_get_unique_id shmem.shmem_init_attr", "", REFUSED, "", BY_GROUP),
    Row(
        "mori",
        "shmem.shmem_module_init",
        "",
        REFUSED,
        "",
        "Peers are written to by kernels over shmem_ptr_p2p's addresses; there is no network library to set up.",
    ),
    Row(
        "mori", "shmem.shmem_barrier_on_stream", "", REFUSED, "", "Synchronise the stream and call shmem_barrier_all()."
    ),
    Row("mori", "shmem.shmem_ext_malloc_with_flags", "", REFUSED, "", "Use shmem_malloc(size)."),
    Row("mori", "shmem.shmem_buffer_register shmem.shmem_buffer_deregister", "", REFUSED, "", BY_MALLOC),
    Row(
        "mori",
        "shmem.shmem_num_qp_per_pe",
        "",
        REFUSED,
        "",
        "Nodes are joined by torch.distributed, whose library has its own settings.",
    ),
    Row("mori", "shmem.MoriShmemBuffer", "", REFUSED, "", "Use mori_shmem_create_tensor."),
    Row("mori", "shmem.symm_mori_shmem_tensor", "peer", REFUSED, "another rank", BY_ADDRESS),
    Row("mori", "shmem.mori_shmem_create_tensor_list_intra_node", "", REFUSED, "", BY_ADDRESS),
)

LAYER = "EPLowLatencyAllToAllLayer"
TRITON_DISTRIBUTED = (
    Row(
        "triton_distributed",
        f"{LAYER} create_ep_ll_a2a_ctx",
        "local_world_size",
        REFUSED,
        "other than world_size",
        "Across nodes use the manager's ops: get_ep_group().device_communicator.all2all_manager.get_handle(...).",
    ),
    Row(
        "triton_distributed",
        f"{LAYER} create_ep_ll_a2a_ctx",
        "fp8_gsize",
        NONE,
        "where tokens have no scales",
        "Only scales have groups.",
    ),
    Row(
        "triton_distributed",
        f"{LAYER}.combine",
        "send_tokens",
        NONE,
        "with zero_copy",
        "Rows are taken from combine_ctx.send_tokens_comm_buf.",
    ),
    Row(
        "triton_distributed",
        f"{LAYER}.dump_dispatch_trace {LAYER}.dump_combine_trace",
        "folder",
        NONE,
        "without enable_profiling",
        "There are no spans to write; the call returns None.",
    ),
)

ROWS = (*DEEP_EP, *MORI, *TRITON_DISTRIBUTED)


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
