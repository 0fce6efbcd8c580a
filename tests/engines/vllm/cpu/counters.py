"""What the ranks of a real engine have counted, checked against each other."""

from typing import Any


def check_ranks_agree(layers: list[dict[str, Any]]) -> None:
    """One layer's counters of all ranks: in each step, what some send others receive, and all know the rows of all."""
    by_rank = [{step["step"]: step for step in layer["latest_steps"]} for layer in layers]
    common = sorted(set.intersection(*map(set, by_rank)))
    assert common
    for number in common:
        steps = [rank[number] for rank in by_rank]
        sent, received, kept = ([step[f"num_{name}_rows"] for step in steps] for name in ("sent", "received", "kept"))
        assert sum(sent) == sum(received), number
        if len(steps) == 2:
            assert sent == received[::-1], number
        rows = [own + others for own, others in zip(kept, received)]
        mean = sum(rows) / len(rows)
        assert {step["rank_rows"] for step in steps} == {mean}, number
        assert {step["skew_rows"] for step in steps} == {max(rows) - mean}, number
        assert all(step["dispatch_wait_us"] > 0 < step["combine_wait_us"] for step in steps), number
    assert sum(layer["num_sent_rows"] for layer in layers) > 0
