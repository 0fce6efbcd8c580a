"""What the two ranks of a real engine have counted, checked against each other."""

from __future__ import annotations

from typing import Any


def check_ranks_agree(layers: list[dict[str, Any]]) -> None:
    """One layer's counters of both ranks: in each step, what one sends the other receives, and both know all rows."""
    ours, theirs = ({step["step"]: step for step in layer["latest_steps"]} for layer in layers)
    common = sorted(set(ours) & set(theirs))
    assert common
    for number in common:
        steps = ours[number], theirs[number]
        sent, received, kept = ([step[f"num_{name}_rows"] for step in steps] for name in ("sent", "received", "kept"))
        assert sent == received[::-1], number
        assert {step["rank_rows"] for step in steps} == {(sum(sent) + sum(kept)) / 2}, number
        assert len({step["skew_rows"] for step in steps}) == 1, number
        assert all(step["dispatch_wait_us"] > 0 < step["combine_wait_us"] for step in steps), number
    assert sum(layer["num_sent_rows"] for layer in layers) > 0
