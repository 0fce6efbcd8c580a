"""The wire word: the choices of a step that all ranks must share, in one word that travels with the counts.

From its lowest bit: whether the step has weights, scales and a cast inside dispatch; the sender's bound of the step
(step_tokens), in as many bits as the op's max_num_inp_token_per_rank (M) has; the tag of the call. The highest of 32
bits is 0.
"""

from collections.abc import Sequence

from ep_a2a.kernels.layout import BOUND_SHIFT

WEIGHTS_BIT, SCALES_BIT, CAST_BIT = 1, 2, 4
WORD_BITS = 31


def bound_mask(max_tokens: int) -> int:
    """The bits of a wire word that hold its sender's bound; max_tokens: M."""
    return (1 << tag_shift(max_tokens)) - (1 << BOUND_SHIFT)


def tag_shift(max_tokens: int) -> int:
    """The bit at which the tag begins; max_tokens: M."""
    return BOUND_SHIFT + max_tokens.bit_length()


def tag_mask(max_tokens: int) -> int:
    """The bits of a tag that travel: 15 for M = 4096, 14 for M = 8192, 4 for the largest M."""
    return (1 << (WORD_BITS - tag_shift(max_tokens))) - 1


def tag_of(word: int, max_tokens: int) -> int:
    """The tag in a wire word."""
    return word >> tag_shift(max_tokens)


def wire_word(bound: int, has_weights: bool, has_scales: bool, cast_inside: bool = False) -> int:
    """The wire word of a rank that brings at most `bound` tokens to the step, with tag 0."""
    bits = (WEIGHTS_BIT if has_weights else 0) | (SCALES_BIT if has_scales else 0) | (CAST_BIT if cast_inside else 0)
    return bits | bound << BOUND_SHIFT


def tagged(word: int, tag: int, max_tokens: int) -> int:
    """The wire word with this tag instead of 0."""
    return word | (tag & tag_mask(max_tokens)) << tag_shift(max_tokens)


def describe_wire_word(word: int, max_tokens: int) -> str:
    """The choices in a wire word, without the tag, in words."""
    bound = (word & bound_mask(max_tokens)) >> BOUND_SHIFT
    weights = "weights" if word & WEIGHTS_BIT else "no weights"
    scales = "scales" if word & SCALES_BIT else "no scales"
    cast = "cast inside dispatch" if word & CAST_BIT else "not cast inside dispatch"
    return f"step_tokens {bound} with {weights}, {scales}, {cast}"


def disagreement(words: Sequence[int], max_tokens: int) -> tuple[str, str, str]:
    """(what is expected, the choice of each rank, the remedy) where the ranks' wire words differ.

    Different tags explain every other difference, since the ranks make different calls.
    """
    tags = [tag_of(word, max_tokens) for word in words]
    if len(set(tags)) > 1:
        return (
            "all ranks to make the same call (tag)",
            ", ".join(f"rank {rank}: tag {tag}" for rank, tag in enumerate(tags)),
            "A rank has left out or repeated a call, such as a layer. A rank without tokens takes part with none.",
        )
    return (
        "the same step_tokens (of a list: for each rank what it has itself), weights, scales and casts on all ranks",
        ", ".join(f"rank {rank}: {describe_wire_word(word, max_tokens)}" for rank, word in enumerate(words)),
        "Pass the same step_tokens everywhere. Where others pass weights or scales, a rank without tokens passes "
        "empty ones, [0, K] and [0, S].",
    )
