"""DeepEP's interface on GPUs: the bodies of tests/multiprocess, in all their forms."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from ep_a2a.testing import RankContext
from tests.cases import deep_ep_cases as cases
from tests.cases.deep_ep_cases import LOW_LATENCY, NORMAL, fp8
from tests.cases.op_cases import Case
from tests.cases.staged_cases import over
from tests.markers import needs_own_gpus

OWN_WORLDS = [pytest.param(number, marks=needs_own_gpus(number)) for number in (2, 4, 8)]
"""Normal mode exchanges its counts over NCCL."""


def on(case: Case, world_size: int) -> Case:
    return replace(case, world_size=world_size, num_experts=3 * world_size)


@pytest.mark.parametrize("world_size", OWN_WORLDS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["in-stream", "asynchronous"])
@pytest.mark.parametrize("with_topk", [False, True], ids=["without-topk", "with-topk"])
@pytest.mark.parametrize("case", [NORMAL, fp8(NORMAL)], ids=["bf16", "fp8"])
def test_normal_mode(ranks: Any, case: Case, with_topk: bool, asynchronous: bool, world_size: int) -> None:
    ranks(cases.normal_mode, world_size, on(case, world_size), with_topk, asynchronous)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("with_hook", [False, True], ids=["asynchronous", "hook"])
@pytest.mark.parametrize(
    "changes",
    [{"quant_type": "none"}, {}, {"scale_format": "float32_power_of_two"}, {"scale_format": "ue8m0"}],
    ids=["bf16", "fp8", "rounded", "ue8m0"],
)
def test_low_latency(ranks: Any, changes: dict[str, Any], with_hook: bool, world_size: int) -> None:
    case = on(replace(LOW_LATENCY, **changes), world_size)
    ranks(cases.low_latency, world_size, case, with_hook, True)


TRANSPORTS = ("peer_memory", "torch.distributed")
"""Between virtual nodes of two ranks."""


@needs_own_gpus(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_normal_mode_between_nodes(ranks: Any, transport: str) -> None:
    case = replace(on(NORMAL, 4), num_nodes=2)
    ranks(over, 4, transport, cases.normal_mode, case, True, True)
    ranks(over, 4, transport, cases.any_order, case)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_low_latency_between_nodes(ranks: Any, transport: str) -> None:
    case = replace(on(LOW_LATENCY, 4), num_nodes=2)
    ranks(over, 4, transport, cases.low_latency, case, True, True)


@needs_own_gpus(2)
@pytest.mark.parametrize(
    ("body", "case", "options"),
    [
        (cases.any_order, NORMAL, ()),
        (cases.growing_batches, NORMAL, ()),
        (cases.hooks, LOW_LATENCY, ()),
        (cases.overwritten_rows, LOW_LATENCY, ()),
        (cases.refusals, NORMAL, ()),
        (cases.normal_mode, NORMAL, (True, False, True)),
        (cases.normal_mode, fp8(NORMAL), (True, False, True)),
    ],
)
def test_bodies(ranks: Any, body: Any, case: Case, options: tuple[bool, ...]) -> None:
    """All of them dispatch in normal mode, too; the last two with num_worst_tokens."""
    ranks(body, 2, case, *options)


def nccl_only(context: RankContext, case: Case) -> None:
    """A group that cannot move CPU tensors, as engines pass it."""
    cases.any_order(replace(context, group=dist.new_group(backend="nccl")), case)


@needs_own_gpus(2)
def test_a_group_without_gloo(ranks: Any) -> None:
    ranks(nccl_only, 2, NORMAL)
