"""The cases that tests/multiprocess and tests/multigpu both run, as (id, Case)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ep_a2a.config import FP8_DTYPE, LOW_LATENCY_MAX_TOKENS
from ep_a2a.routing import ROUTINGS
from ep_a2a.tuning.policy import MAX_COUNTED_ALONE
from tests.cases.op_cases import Case

if TYPE_CHECKING:
    from collections.abc import Collection

UNEVEN = ((8, 5, 0, 3), (0, 9, 1, 2), (2, 3, 8, 0))
LAYOUTS = ("compact", "rank_major")


def _routings() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, num_steps=3, topk=3, num_experts=12)
    return {
        f"{layout}-{routing}": replace(base, layout=layout, routing=routing, seed=seed)
        for layout in LAYOUTS
        for seed, routing in enumerate(ROUTINGS)
    }


def _worlds() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, num_steps=3, hidden_dim=40, topk=2)
    return {
        f"W{world_size}-{layout}": replace(base, world_size=world_size, num_experts=2 * world_size + 1, layout=layout)
        for world_size in (1, 2, 3, 5, 6)
        for layout in LAYOUTS
    }


def _shapes() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, world_size=3, num_experts=40, layout="rank_major")
    cases = {f"K{topk}": replace(base, topk=topk) for topk in (1, 7, 8, 9, 32)}
    cases |= {f"H{hidden}": replace(base, hidden_dim=hidden) for hidden in (8, 24, 1000, 1032)}
    cases |= {
        "few-experts": replace(base, world_size=5, num_experts=3, layout="compact"),
        "sixty-on-eight-ranks-share": replace(base, world_size=6, num_experts=45, topk=6, layout="compact"),
        "K-beyond-experts": replace(base, topk=8, num_experts=4),
        "long-rows": replace(base, hidden_dim=9216, num_steps=1),
    }
    return cases


def _dtypes() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, world_size=4, hidden_dim=128)
    fp8 = replace(base, dtype=FP8_DTYPE)
    return {
        "fp16": replace(base, dtype=torch.float16),
        "fp32": replace(base, dtype=torch.float32, layout="rank_major"),
        "fp8-per-token-scales": replace(fp8, scale_dim=1),
        "fp8-block-scales": replace(fp8, scale_dim=3, layout="rank_major"),
        "fp8-byte-scales": replace(fp8, scale_dim=5, scale_dtype=torch.uint8),
        "fp8-without-scales": fp8,
        "bf16-with-scales": replace(base, scale_dim=4, scale_dtype=torch.uint8),
        "fp32-combine": replace(base, options={"combine_dtype": torch.float32}),
        "fp16-combine": replace(fp8, options={"combine_dtype": torch.float16}),
    }


def _casts() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, world_size=4, hidden_dim=256, layout="rank_major")
    return {
        f"{quant}-{scale_format}": replace(base, quant_type=quant, scale_format=scale_format)
        for quant in ("fp8_per_token", "fp8_per_1x128")
        for scale_format in ("float32", "ue8m0", "float32_power_of_two")
    } | {
        "cast-fp32-compact": replace(base, quant_type="fp8_per_1x128", dtype=torch.float32, layout="compact"),
        "cast-fp16-odd-hidden": replace(base, quant_type="fp8_per_token", dtype=torch.float16, hidden_dim=144),
    }


def _contracts() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, num_steps=4)
    small = ((3, 2, 0, 3), (9, 1, 5, 0), (1, 1, 1, 1), (0, 0, 0, 0))
    return {
        "no-weights": replace(base, with_weights=False),
        "combine-without-weights": replace(base, combine_weights=False),
        "zero-copy-compact": replace(base, zero_copy=True),
        "zero-copy-rank-major": replace(base, zero_copy=True, layout="rank_major", combine_weights=False),
        "max-num-tokens-compact": replace(base, tokens=small, max_num_tokens=(3, None, 1, 4), num_steps=8),
        "max-num-tokens-rank-major": replace(
            base, tokens=small, max_num_tokens=(3, None, 1, 4), num_steps=8, layout="rank_major"
        ),
        "pad-id": replace(base, pad_id=7, layout="rank_major"),
        "pad-id-compact": replace(base, pad_id=-5),
        "bias": replace(base, num_biases=1),
        "biases-in-halves": replace(base, num_biases=2, split="mixed", layout="rank_major", dtype=torch.float16),
        "biases-of-few": replace(base, num_biases=2, tokens=small, routing="out_of_range"),
        "biases-fp8": replace(base, num_biases=2, hidden_dim=256, quant_type="fp8_blockwise", combine_weights=False),
        "cap": replace(base, options={"max_total_recv_tokens": 48}),
        "nobody-has-tokens": replace(base, tokens=((0,),)),
        "epoch-2**31": replace(base, first_epoch=2**31 - 3, num_steps=6, layout="rank_major"),
        "epoch-2**32": replace(base, first_epoch=2**32 - 3, num_steps=6),
        "fifty-steps": replace(base, world_size=2, num_steps=50, hidden_dim=16, layout="rank_major"),
    }


def _expert_major() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, num_steps=3, topk=3, num_experts=12, layout="expert_major")
    small = ((3, 2, 0, 3), (9, 1, 5, 0), (1, 1, 1, 1), (0, 0, 0, 0))
    cast = replace(base, hidden_dim=256)
    cases = {routing: replace(base, routing=routing, seed=seed) for seed, routing in enumerate(ROUTINGS)}
    cases |= {f"W{size}": replace(base, world_size=size, num_experts=2 * size + 1) for size in (1, 2, 3, 5)}
    cases |= {
        "aligned": replace(base, options={"expert_alignment": 8}),
        "aligned-beyond-the-block": replace(base, options={"expert_alignment": 48}, topk=12, world_size=2),
        "aligned-beyond-int32": replace(base, options={"expert_alignment": 1 << 29}, world_size=2),
        "aligned-cast": replace(cast, quant_type="fp8_per_1x128", options={"expert_alignment": 4}),
        "max-num-tokens": replace(
            base, tokens=small, max_num_tokens=(3, None, 1, 4), num_steps=8, options={"expert_alignment": 4}
        ),
        "zero-copy": replace(base, zero_copy=True),
        "biases": replace(base, num_biases=2),
        "halves": replace(base, split="mixed", options={"expert_alignment": 4}),
        "direct": replace(base, options={"flagged_max_tokens": 0}),
        "nobody-has-tokens": replace(base, tokens=((0,),)),
        "few-experts": replace(base, world_size=5, num_experts=3, topk=2),
        "K-beyond-experts": replace(base, world_size=2, topk=8, num_experts=4),
        "K32": replace(base, world_size=2, topk=32, num_experts=40),
        "pad-id-is-an-expert": replace(base, pad_id=1),
        "long-rows": replace(base, world_size=2, hidden_dim=9216, num_steps=1),
        "fp8-block-scales": replace(cast, dtype=FP8_DTYPE, scale_dim=3),
        "fp8-byte-scales": replace(cast, dtype=FP8_DTYPE, scale_dim=5, scale_dtype=torch.uint8),
        "fp32-combine": replace(base, options={"combine_dtype": torch.float32}),
        "fp16": replace(base, dtype=torch.float16),
        "ue8m0": replace(cast, quant_type="fp8_per_1x128", scale_format="ue8m0"),
        "per-token": replace(cast, quant_type="fp8_per_token", dtype=torch.float32),
        # more than a program numbers at once
        "many-rows": replace(
            base, world_size=1, max_tokens=270, tokens=((270,),), topk=17, num_experts=18, hidden_dim=8, num_steps=1
        ),
    }
    return {f"expert_major-{name}": case for name, case in cases.items()}


def _combine_quants() -> dict[str, Case]:
    """fp8 on the wire of combine: results of every kind and dtype, in rows of one block, of many, and of a part."""
    base = Case(world_size=2, num_experts=6, tokens=((9, 5), (0, 3), (3, 8)), num_steps=3, unusual=True)
    cases = {}
    for layout in LAYOUTS:
        for position, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            for quant in ("fp8_blockwise", "fp8_direct_cast"):
                hidden = (128, 256, 1152)[(position + (layout == "compact") + (quant == "fp8_blockwise")) % 3]
                name = f"{quant}-{str(dtype).removeprefix('torch.')}-{layout}-H{hidden}"
                cases[name] = replace(base, quant_type=quant, dtype=dtype, layout=layout, hidden_dim=hidden)
    blockwise = replace(base, quant_type="fp8_blockwise", hidden_dim=256)
    both = {"dispatch_quant_type": "fp8_per_1x128"}
    return cases | {
        "fp8_blockwise-four-ranks": replace(blockwise, world_size=4, tokens=UNEVEN, split="mixed"),
        "fp8_blockwise-ordinary": replace(blockwise, unusual=False, topk=6, hidden_dim=2048),
        "fp8_blockwise-zero-copy": replace(blockwise, zero_copy=True, combine_weights=False),
        "fp8_blockwise-and-cast": replace(blockwise, options=both),
        "fp8_blockwise-and-cast-ue8m0": replace(blockwise, options=both, scale_format="ue8m0", hidden_dim=640),
        "fp8_blockwise-fp8-tokens": replace(blockwise, dtype=FP8_DTYPE, scale_dim=2),
        "fp8_direct_cast-and-cast": replace(
            blockwise, quant_type="fp8_direct_cast", options={"dispatch_quant_type": "fp8_per_token"}, hidden_dim=144
        ),
        "fp8_direct_cast-three-ranks": replace(
            base, quant_type="fp8_direct_cast", world_size=3, tokens=((9, 5, 0),), hidden_dim=1040, split="mixed"
        ),
        "fp8_direct_cast-smallest": replace(base, quant_type="fp8_direct_cast", hidden_dim=16),
    }


def _unusual() -> dict[str, Case]:
    """Rows, ids, weights and scales that look like the marks by which kernels know what has arrived."""
    base = Case(
        world_size=2,
        num_experts=6,
        tokens=((9, 5), (8, 10), (3, 16)),
        num_steps=4,
        routing="out_of_range",
        unusual=True,
        layout="rank_major",
    )
    fp8 = replace(base, dtype=FP8_DTYPE)
    cases = {
        "bf16": base,
        "bf16-compact": replace(base, layout="compact"),
        "fp32": replace(base, dtype=torch.float32),
        "fp16-split": replace(base, dtype=torch.float16, split="mixed"),
        "fp8": fp8,
        "fp8-scales": replace(fp8, scale_dim=2, layout="compact"),
        "fp8-byte-scales": replace(fp8, scale_dim=5, scale_dtype=torch.uint8),
        "smallest-rows": replace(base, hidden_dim=8),
        "smallest-rows-fp8": replace(fp8, hidden_dim=16),
        "long-rows": replace(base, hidden_dim=9216, dtype=torch.float32, num_steps=2, tokens=((8, 9),), max_tokens=9),
        "cast": replace(base, quant_type="fp8_per_1x128", hidden_dim=256),
        "cast-fp32-ue8m0": replace(base, quant_type="fp8_per_token", scale_format="ue8m0", dtype=torch.float32),
        "epoch-2**31": replace(base, first_epoch=2**31 - 3, num_steps=6),
        "epoch-2**32": replace(base, first_epoch=2**32 - 4, num_steps=6, layout="compact"),
        "four-ranks": replace(base, world_size=4, tokens=UNEVEN, num_experts=9),
    }
    return {f"unusual-{name}": case for name, case in cases.items()}


def _halves() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, num_steps=4, world_size=3, num_experts=7)
    return {
        f"halves-{which}-{layout}": replace(base, split=which, layout=layout)
        for which in ("all", "mixed")
        for layout in LAYOUTS
    } | {
        "halves-nobody-has-tokens": replace(base, tokens=((0,),), split="mixed"),
        "halves-cast": replace(base, split="mixed", quant_type="fp8_per_1x128", hidden_dim=256, combine_weights=False),
        "halves-max-num-tokens": replace(
            base, tokens=((3, 2, 0), (9, 1, 5)), max_num_tokens=(3, None), split="mixed", num_steps=6, pad_id=-3
        ),
    }


def _both_dispatches() -> dict[str, Case]:
    """Steps that are flagged and steps that are not, of one op."""
    sizes = ((4, 1, 0, 3), (9, 6, 0, 5), (1, 4, 4, 2), (5, 0, 7, 10), (0, 0, 0, 0), (0, 0, 1, 0), (3, 3, 3, 3))
    base = Case(
        tokens=sizes,
        max_num_tokens=(4, 16, 4, None, 3, 5, 4),
        num_steps=9,
        options={"flagged_max_tokens": 4},
        pad_id=-2,
    )
    return {
        f"both-{name}": replace(base, **changes)
        for name, changes in {
            "compact": {},
            "rank_major": {"layout": "rank_major"},
            "unusual": {"unusual": True, "world_size": 2, "routing": "out_of_range"},
            "unusual-rank_major-halves": {
                "unusual": True,
                "world_size": 3,
                "num_experts": 7,
                "layout": "rank_major",
                "split": "mixed",
            },
            "cast": {"quant_type": "fp8_per_1x128", "hidden_dim": 256, "world_size": 2},
            "epoch-2**32": {"first_epoch": 2**32 - 6, "world_size": 2, "layout": "rank_major"},
        }.items()
    }


def _look_back() -> dict[str, Case]:
    """Steps that allow so many tokens that programs learn counts from the programs before them, and have few."""
    base = Case(
        world_size=3,
        num_experts=7,
        topk=3,
        hidden_dim=8,
        max_tokens=MAX_COUNTED_ALONE + 77,
        num_steps=3,
        tokens=((7, 0, 13), (1, 20, 2), (16, 4, 0)),
    )
    return {
        f"look_back-{name}": replace(base, **changes)
        for name, changes in {
            "compact": {"routing": "zipf"},
            "rank_major": {"routing": "some_dropped", "layout": "rank_major", "split": "mixed"},
            "expert_major": {"routing": "out_of_range", "layout": "expert_major"},
            "all_to_one": {"routing": "all_to_one", "layout": "rank_major", "num_steps": 2},
            "one-step-less": {"max_num_tokens": (MAX_COUNTED_ALONE + 1, MAX_COUNTED_ALONE, None)},
            "epoch-2**32": {"first_epoch": 2**32 - 3, "world_size": 2},
            # a program's own tokens are more than it looks at at once
            "many-tokens": {"tokens": ((200, 9),), "world_size": 2, "topk": 2, "num_steps": 1},
        }.items()
    }


def _three_dispatches() -> dict[str, Case]:
    """Steps that are flagged, of which each program counts all ids, and that look back, in turn, of one op."""
    base = Case(
        world_size=2,
        num_experts=5,
        hidden_dim=8,
        max_tokens=MAX_COUNTED_ALONE + 77,
        num_steps=8,
        pad_id=-2,
        tokens=((9, 4), (0, 7), (16, 3), (1, 1), (5, 0)),
        max_num_tokens=(
            LOW_LATENCY_MAX_TOKENS,
            LOW_LATENCY_MAX_TOKENS + 1,
            None,
            20,
            MAX_COUNTED_ALONE + 1,
            MAX_COUNTED_ALONE,
            16,
        ),
    )
    return {
        "three_dispatches-compact": replace(base, routing="zipf"),
        "three_dispatches-rank_major": replace(
            base, routing="out_of_range", layout="rank_major", unusual=True, split="mixed"
        ),
    }


def _counted_alone() -> dict[str, Case]:
    """Steps of more tokens than a program looks at at once, where it counts all of those before its own."""
    base = Case(world_size=2, num_experts=5, hidden_dim=8, max_tokens=400, tokens=((390, 257),), num_steps=1)
    return {"alone-many-tokens": replace(base, routing="some_dropped")}


def _direct(cases: dict[str, Case]) -> dict[str, Case]:
    """The same by direct writes, for steps that would otherwise be flagged."""
    never = {"flagged_max_tokens": 0}
    return {
        f"{name}-direct": replace(case, options=case.options | never)
        for name, case in cases.items()
        if case.max_tokens <= LOW_LATENCY_MAX_TOKENS and name != "fifty-steps"
    }


def _some_routings() -> dict[str, Case]:
    chosen = ("uniform", "out_of_range")
    return {name: case for name, case in _routings().items() if case.routing in chosen}


DIRECT = _direct(_some_routings() | _contracts() | _dtypes() | _casts() | _worlds() | _halves() | _unusual())
# What differs from the flagged way in payload only, which both ways share: enough on GPUs, where it takes no time.
DIRECT_PAYLOADS = _direct(_dtypes() | _casts() | _worlds()).keys()

CASES: dict[str, Case] = (
    _expert_major()
    | _routings()
    | _contracts()
    | _dtypes()
    | _casts()
    | _shapes()
    | _worlds()
    | _combine_quants()
    | _unusual()
    | _halves()
    | _both_dispatches()
    | _look_back()
    | _three_dispatches()
    | _counted_alone()
    | DIRECT
)


def by_world_size(*, left_out: Collection[str] = ()) -> list[tuple[str, Case]]:
    """All cases but some, those of one world size together, so that one pool of processes serves them."""
    chosen = [(name, case) for name, case in CASES.items() if name not in left_out]
    return sorted(chosen, key=lambda item: item[1].world_size)
