"""Compares greedy completions of two engines whose sums are of another order.

Where a token's last expert and the next one have scores that differ by less than rounding, engines take one or the
other, and one step of one completion differs by more than rounding does elsewhere: a tie.
"""

import math
from dataclasses import dataclass, field
from typing import Any

Completion = dict[str, Any]
"""`tokens`, and as `top` the likeliest tokens of each step with their log probabilities."""

TIE_LOGPROB = 0.5
"""In nats: what another expert of eight may do to a log probability."""


@dataclass
class Difference:
    """How completions differ from expected ones.

    Attributes:
        num_tokens: of all completions.
        num_agreed: those before the first other token of their completion.
        first_logprob: the largest difference of the log probability that a completion's expected first token has: what
            one step may do, before anything of an earlier step comes to it.
        logprobs: differences of the agreed tokens' log probabilities, in nats. max_logprob: the largest.
        max_gap: by how much, in nats, the expected engine preferred its own token where the first other one came. Each
            of the two log probabilities may differ by max_logprob, so twice that much is rounding.
    """

    num_tokens: int = 0
    num_agreed: int = 0
    first_logprob: float = 0.0
    max_logprob: float = 0.0
    max_gap: float = 0.0
    logprobs: list[float] = field(default_factory=list, repr=False)

    def is_rounding(self, tolerance: float, num_ties: int = 0) -> bool:
        """Whether differences of log probabilities up to `tolerance` explain all of it, and most tokens agree.

        So many agreed tokens as `num_ties` may differ by up to TIE_LOGPROB instead.
        """
        agree = self.num_agreed >= self.num_tokens / 2
        beyond = [difference for difference in self.logprobs if difference > tolerance]
        are_ties = len(beyond) <= num_ties and max(beyond, default=0.0) <= TIE_LOGPROB
        return agree and are_ties and self.max_gap <= 2 * tolerance


def compare(got: dict[int, Completion], expected: dict[int, Completion]) -> Difference:
    """Compares up to the first other token of each completion, since from there on it says nothing."""
    assert got.keys() == expected.keys()
    assert got
    found = Difference()
    for number, mine in got.items():
        theirs = expected[number]
        assert len(mine["tokens"]) == len(theirs["tokens"]), number
        found.num_tokens += len(mine["tokens"])
        first = theirs["tokens"][0]
        found.first_logprob = max(found.first_logprob, abs(_logprob(mine, 0, first) - _logprob(theirs, 0, first)))
        for at, (token, their_token) in enumerate(zip(mine["tokens"], theirs["tokens"])):
            if token != their_token:
                gap = _logprob(theirs, at, their_token) - _logprob(theirs, at, token)
                found.max_gap = max(found.max_gap, gap)
                break
            found.num_agreed += 1
            found.logprobs.append(abs(_logprob(mine, at, token) - _logprob(theirs, at, token)))
    found.max_logprob = max(found.logprobs, default=0.0)
    return found


def _logprob(completion: Completion, at: int, token: int) -> float:
    """Of a token at a step, among those kept; -inf if it was none of the likeliest."""
    found = next((logprob for other, logprob in completion["top"][at] if other == token), -math.inf)
    assert not math.isnan(found)
    return float(found)
