"""InterNodeV1 and its kin with all memory addressable, on virtual nodes of CPU processes, against the oracle.

The bodies are those of the op inside a node; only the kernels differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.op_cases import Case, run_case
from tests.op_matrix import CASES, UNEVEN
from tests.op_special import BODIES, missing_rank

RINGS = {"chunk_tokens": 3, "ring_chunks": 2, "rdma_block_num": 2}
OF_FOUR_RANKS = (
    *(name for name in CASES if name.startswith("rank_major-") and not name.endswith("-direct")),
    "compact-uniform", "compact-out_of_range", "expert_major-zipf", "expert_major-aligned-cast", "no-weights",
    "combine-without-weights", "max-num-tokens-compact", "pad-id", "cap", "nobody-has-tokens", "fp32",
    "fp8-byte-scales", "fp16-combine", "fp8_per_token-ue8m0", "fp8_per_1x128-float32_power_of_two",
    "cast-fp16-odd-hidden", "unusual-four-ranks", "epoch-2**32",
)  # fmt: skip
FEW = Case(layout="rank_major", tokens=UNEVEN, num_steps=3, topk=3, num_experts=9, routing="out_of_range", num_nodes=2)
SHAPES: dict[str, Case] = {
    # every role of a channel must go on while another has no room
    "one-channel-one-chunk": replace(FEW, options={"chunk_tokens": 1, "ring_chunks": 1, "rdma_block_num": 1}),
    "one-channel-one-chunk-compact": replace(
        FEW, layout="compact", options={"chunk_tokens": 2, "ring_chunks": 1, "rdma_block_num": 1}
    ),
    "more-channels-than-programs": replace(FEW, options={"chunk_tokens": 2, "ring_chunks": 1, "rdma_block_num": 5}),
    "one-chunk-holds-all": replace(FEW, options={"chunk_tokens": 64}),
    "halves": replace(FEW, split="mixed", options=RINGS),
    "halves-whole-steps": replace(FEW, split="mixed", kernel="AsyncLL", num_steps=4),
    "whole-steps": replace(FEW, kernel="InterNodeV1LL", options={"rdma_block_num": 3}),
    "whole-steps-cast": replace(
        FEW, kernel="InterNodeV1LL", layout="compact", quant_type="fp8_per_1x128", hidden_dim=256
    ),
    "flat": replace(FEW, kernel="InterNode", split="mixed"),
    "many-tokens": Case(
        world_size=2, num_nodes=2, num_experts=5, hidden_dim=8, max_tokens=400, tokens=((390, 257),), num_steps=1,
        routing="some_dropped", layout="rank_major",
    ),
} | {
    f"{num_nodes}x{per_node}-{layout}": Case(
        world_size=num_nodes * per_node, num_nodes=num_nodes, num_experts=2 * num_nodes * per_node + 1, topk=3,
        hidden_dim=40, tokens=UNEVEN, num_steps=2, layout=layout, routing="out_of_range", options=RINGS,
    )
    for num_nodes, per_node, layout in (
        (2, 3, "rank_major"), (3, 2, "compact"), (4, 1, "rank_major"), (2, 4, "compact"), (2, 1, "expert_major"),
    )
}  # fmt: skip
SPECIAL = (
    "late-rank",
    "two-interleaved-ops",
    "sequential-ops-share-memory",
    "fixed-addresses",
    "weights-on-some-ranks",
)


@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(ranks: Any, name: str) -> None:
    case = CASES[name]
    ranks(run_case, 4, replace(case, num_nodes=2, num_steps=min(case.num_steps, 4), options=case.options | RINGS))


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SHAPES.items()])
def test_shapes(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case)


@pytest.mark.parametrize("name", SPECIAL)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    few = replace(case, world_size=2, num_nodes=2, tokens=((5, 3), (2, 9)), num_experts=5, options=RINGS)
    ranks(body, few.world_size, few)


@pytest.mark.parametrize("kernel", ["InterNodeV1", "AsyncLL"])
def test_replayed_steps(ranks: Any, kernel: str) -> None:
    body, _ = BODIES["graph-rank-major"]
    case = Case(
        world_size=4, num_nodes=2, kernel=kernel, tokens=((5, 2, 0, 3),), num_experts=9, layout="rank_major",
        options=RINGS,
    )  # fmt: skip
    ranks(body, case.world_size, case)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_missing_rank(ranks: Any, phase: str) -> None:
    case = Case(
        world_size=4, num_nodes=2, num_experts=8, layout="rank_major", with_weights=False, combine_weights=False,
        options=RINGS,
    )  # fmt: skip
    ranks(missing_rank, case.world_size, case, phase)
