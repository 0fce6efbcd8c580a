"""The first launch of a combine over rings: results move to where the other ranks of the node read them.

- C1. Each program puts its share of the received rows' results there, cast to fp8 if that is asked for, and weights.
- C2. The last program to get here posts to every peer that this rank's results are there.

The steps from C3 on stand in ring_combine_kernels.py.
"""

import triton.language as tl

from ep_a2a.kernels.combine_kernels import post_to_peers
from ep_a2a.kernels.combine_send_kernels import load_block, push_block, return_places, unlike_dispatch
from ep_a2a.kernels.layout import Region, Stage, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, arrive_last, begin_launch, finish_stage


@portable
def offer_row(rows_in, weights_in, places, row, op, B: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    """Puts one row, and its weights, where the ranks of this node read them (places: ReturnPlaces)."""
    for start in tl.static_range(0, B.WIDTH, B.GROUPS_LANES * B.GROUP):
        values = load_block(rows_in, row, 1, start, B)
        push_block(values, places, row, 1, start, B, rows_in.dtype.element_ty, True)
    if HAS_WEIGHTS:
        # where they lie is not known to be aligned
        choices = tl.arange(0, op.TOPK_LANES)
        where = tl.cast(row, tl.int64) * op.TOPK + choices
        words = tl.load(weights_in + where, mask=choices < op.TOPK)
        tl.store(places.weights + where, words, mask=choices < op.TOPK)


@portable(do_not_specialize=["num_tokens", "step_tokens", "rank"], do_not_specialize_on_alignment=["weights_in"])
def offer_results_kernel(
    rows_in, weights_in, table, num_tokens, step_tokens, rank,
    S: tl.constexpr, B: tl.constexpr, HAS_WEIGHTS: tl.constexpr, POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Puts the received rows' results where the ranks of this node read them, and raises this rank's flags.

    Args:
        rows_in, weights_in, step_tokens: as of combine_kernel.
        S: Shape. B: the Block that a program takes at once. POISON_LANES: at least the threads of a program.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    unlike = unlike_dispatch(address(op, Region.STATE, tl.int32), num_tokens, step_tokens)
    epoch, poison = begin_launch(op, Stage.COMBINE_SEND, StepPhase.COMBINE, POISON_LANES, unlike)
    received = address(op, Region.RECV_COUNTS, tl.int32)
    places = return_places(op, rank, B.ELEMENT)
    # C1
    if poison == 0:
        before = tl.full((), 0, tl.int32)
        for source in range(S.WORLD_SIZE):
            count, first = tl.load(received + source), tl.load(received + S.WORLD_SIZE + source)
            # rows are shared out over all sources: a few from each would else all be the first programs'
            own = (program + num_programs - before % num_programs) % num_programs
            for index in range(own, count, num_programs):
                offer_row(rows_in, weights_in, places, first + index, op, B, HAS_WEIGHTS)
            before += count
    # C2
    is_last, any_poisoned = arrive_last(op, num_programs, poison)
    if is_last & (any_poisoned == 0):
        post_to_peers(op, epoch, HAS_WEIGHTS, True)
    finish_stage(op, Stage.COMBINE_SEND, program, num_programs)
