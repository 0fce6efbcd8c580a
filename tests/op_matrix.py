"""The cases that tests/multiprocess and tests/multigpu both run, as (id, Case)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ep_a2a.config import FP8_DTYPE
from ep_a2a.routing import ROUTINGS
from tests.op_cases import Case

UNEVEN = ((16, 9, 0, 5), (0, 16, 1, 2), (3, 3, 16, 0))
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
        for scale_format in ("float32", "ue8m0")
    } | {
        "cast-fp32-compact": replace(base, quant_type="fp8_per_1x128", dtype=torch.float32, layout="compact"),
        "cast-fp16-odd-hidden": replace(base, quant_type="fp8_per_token", dtype=torch.float16, hidden_dim=144),
    }


def _contracts() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, num_steps=4)
    small = ((3, 2, 0, 3), (16, 1, 7, 0), (1, 1, 1, 1), (0, 0, 0, 0))
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
        "cap": replace(base, options={"max_total_recv_tokens": 48}),
        "nobody-has-tokens": replace(base, tokens=((0,),)),
        "epoch-2**31": replace(base, first_epoch=2**31 - 3, num_steps=6, layout="rank_major"),
        "epoch-2**32": replace(base, first_epoch=2**32 - 3, num_steps=6),
        "fifty-steps": replace(base, world_size=2, num_steps=50, hidden_dim=16, layout="rank_major"),
    }


CASES: dict[str, Case] = _routings() | _contracts() | _dtypes() | _casts() | _shapes() | _worlds()


def by_world_size() -> list[tuple[str, Case]]:
    """All cases, those of one world size together, so that one pool of processes serves them."""
    return sorted(CASES.items(), key=lambda item: item[1].world_size)
