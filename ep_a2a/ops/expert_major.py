"""Layout expert_major: launches that turn received rows (as in rank_major) into rows by expert, and back."""

from collections.abc import Iterator

from ep_a2a.kernels.compiled_kernel import TRITON_DTYPES
from ep_a2a.kernels.constants import Expand
from ep_a2a.kernels.expert_kernels import expand_kernel, number_expert_rows_kernel, reduce_experts_kernel
from ep_a2a.kernels.layout import WORD_BYTES, padded
from ep_a2a.ops.launches import CombineForm, DispatchForm, KernelLaunch, no_operands, reducing_operands
from ep_a2a.ops.op_kernels import OpKernels
from ep_a2a.ops.row_constants import scale_constants
from ep_a2a.policy import INTERPRETED_PROGRAMS

# Round trips were timed in this layout, but with no other values of the constants below.

NUMBER_WARPS = 8
NUMBERED_IDS = 8192
"""Received ids that a program reads at once, 32 for each of its threads: few rounds for many rows."""
EXPAND_WARPS = 8
MAX_EXPAND_WORDS = 4096
"""The most words of a row that a program copies at once: a row of 7168 bf16 elements has 3584."""
REDUCE_WARPS = 4
REDUCE_ELEMENTS = 1024
"""Elements of a row that a program adds at once, 8 for each of its threads: 16 bytes of bf16, its widest load."""
THREADS_PER_SM = 1024
"""Threads per multiprocessor that keep memory busy: half of what an H200's holds, so that each may have 64 registers.
These programs never wait, so more of them would also finish."""


def expanding(kernels: OpKernels, form: DispatchForm) -> Iterator[KernelLaunch]:
    """The launches that number the received rows and copy them to a block for each expert.

    The first has a short program for each expert, whatever bounds the multiprocessors.
    """
    config = kernels.config
    most_rows = config.world_size * config.max_num_inp_token_per_rank
    common = {"S": kernels.shape, "SPANS": kernels.spans}
    block_rows = max(1, NUMBERED_IDS // padded(config.topk))
    numbering = common | {"BLOCK_ROWS": min(block_rows, padded(most_rows))}
    step, num_experts = (form.bounds.num_rows, config.rank), config.num_local_experts
    # a rank without experts receives nothing, and a launch needs a program
    yield kernels.launch(
        number_expert_rows_kernel,
        no_operands,
        None,
        numbering,
        NUMBER_WARPS,
        numbers=(*step, config.first_received_id, num_experts),
        num_programs=max(1, num_experts),
    )
    row_words = config.hidden_dim * config.wire_dtype.itemsize // WORD_BYTES
    block_words = min(padded(row_words), MAX_EXPAND_WORDS)
    has_scales = config.casts_in_dispatch or form.has_scales
    expand = Expand(
        row_words,
        block_words,
        *scale_constants(config.num_scales * config.scale_bytes if has_scales else 0),
        # no block has more rows, and a larger number would overflow the kernel's
        ALIGNMENT=min(config.expert_alignment, most_rows),
        COLUMN_MULTIPLE=config.column_rows(1) if config.column_major_scales else 0,
    )
    yield kernels.launch(
        expand_kernel,
        no_operands,
        None,
        common | {"E": expand},
        EXPAND_WARPS,
        numbers=(*step, num_experts),
        num_programs=_num_programs(kernels, form.bounds.num_rows, -(-row_words // block_words), EXPAND_WARPS),
    )


def reducing(kernels: OpKernels, form: CombineForm) -> KernelLaunch:
    """The launch that adds the experts' rows by their weights, [E, R, H], into REDUCED_ROWS."""
    config = kernels.config
    block = min(padded(config.hidden_dim), REDUCE_ELEMENTS)
    return kernels.launch(
        reduce_experts_kernel,
        reducing_operands,
        form.read_as(config),
        {
            "S": kernels.shape,
            "SPANS": kernels.spans,
            "HIDDEN": config.hidden_dim,
            "BLOCK": block,
            "DTYPE": TRITON_DTYPES[config.combined_dtype],
        },
        REDUCE_WARPS,
        numbers=(form.bounds.step_tokens, config.rank),
        num_programs=_num_programs(kernels, form.bounds.num_rows, -(-config.hidden_dim // block), REDUCE_WARPS),
    )


def _num_programs(kernels: OpKernels, num_rows: int, num_blocks: int, num_warps: int) -> int:
    """A program for each possible block of rows, but no more than keep the multiprocessors busy."""
    most = kernels.num_sms * max(1, THREADS_PER_SM // (32 * num_warps)) or INTERPRETED_PROGRAMS
    if 0 < kernels.max_sms < kernels.num_sms:
        most = kernels.max_sms  # the GPU spreads programs over all it has
    return max(1, min(num_rows * num_blocks, most))
