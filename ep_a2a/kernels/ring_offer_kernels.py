"""The first launch of a combine over rings: results are put where the other ranks of the node can read them."""

import triton.language as tl

from ep_a2a.kernels.combine_kernels import tell_peers
from ep_a2a.kernels.combine_send_kernels import load_block, push_block, return_places
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.primitives import (
    NUM_TOKENS,
    POISON,
    STATE,
    address,
    arrive_last,
    ask_poison,
    begin_stage,
    finish_stage,
    may_go_on,
)

RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
COMBINE_SEND = tl.constexpr(Stage.COMBINE_SEND.value)


@portable(do_not_specialize=["num_tokens", "stride", "rank"], do_not_specialize_on_alignment=["weights_in"])
def offer_results_kernel(
    rows_in, weights_in, table, num_tokens, stride, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr,
    POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Puts the received rows' results where the ranks of this node can read them, and tells that they are there.

    Args:
        rows_in, weights_in: as of combine_kernel, and so ELEMENT, QUANTIZED and SCALED. Rows are taken in blocks of
            GROUPS_LANES * GROUP elements.
    """
    block: tl.constexpr = GROUPS_LANES * GROUP
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, COMBINE_SEND, WORLD_SIZE)
    # a graph of another number of tokens would leave rows behind that nobody takes
    sent_tokens = tl.load(address(table, STATE, rank, WORLD_SIZE, tl.int32) + NUM_TOKENS)
    out_of_order = out_of_order | tl.cast(sent_tokens - num_tokens, tl.int64)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 2, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    counts = address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32)
    places = return_places(table, rank, WORLD_SIZE, ELEMENT)
    if poison == 0:
        first, before = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for source in range(WORLD_SIZE):
            count = tl.load(counts + source)
            if not COMPACT:
                first = source * stride
            # rows are shared out over all sources: a few from each would else all be the first programs'
            own = (program + num_programs - before % num_programs) % num_programs
            for index in range(own, count, num_programs):
                row = first + index
                for start in tl.static_range(0, HIDDEN, block):
                    values = load_block(rows_in, row, start, HIDDEN, GROUPS_LANES, GROUP)
                    push_block(values, places, row, start, HIDDEN, GROUPS_LANES, GROUP, QUANTIZED, SCALED)
                if HAS_WEIGHTS:
                    # where they lie is not known to be aligned
                    choices = tl.arange(0, TOPK_LANES)
                    where = tl.cast(row, tl.int64) * TOPK + choices
                    words = tl.load(weights_in + where, mask=choices < TOPK)
                    tl.store(places[2] + where, words, mask=choices < TOPK)
            first += count
            before += count
    is_last, any_poisoned = arrive_last(table, rank, num_programs, poison, WORLD_SIZE)
    if is_last:
        if not any_poisoned:
            tell_peers(table, epoch, rank, WORLD_SIZE, WORLD_LANES, HAS_WEIGHTS, True)
    finish_stage(table, COMBINE_SEND, program, num_programs, WORLD_SIZE)
