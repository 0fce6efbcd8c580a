"""DeepEP's interface on CPU processes: the logic of DeepEP's own tests, orders of calls, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cases import deep_ep_cases as cases
from tests.cases.deep_ep_cases import LOW_LATENCY, NORMAL, fp8
from tests.cases.op_cases import Case
from tests.cases.staged_cases import over

BOUNDED = replace(fp8(NORMAL), tokens=((0, 7),))
TO_RANK_0: dict[str, Any] = {"routing": "all_to_one", "tokens": ((3, 0), (2, 3), (0, 0), (0, 4)), "num_steps": 4}
"""Steps in which rank 1 receives nothing, brings nothing, or both; in one nobody brings anything."""


@pytest.mark.parametrize(
    ("case", "with_topk", "asynchronous", "is_bounded"),
    [
        (NORMAL, True, True, False),
        (fp8(NORMAL), True, False, False),
        (NORMAL, False, False, False),
        (BOUNDED, True, False, True),
    ],
    ids=["bf16", "fp8", "without-topk", "bounded"],
)
def test_normal_mode(ranks: Any, case: Case, with_topk: bool, asynchronous: bool, is_bounded: bool) -> None:
    for each in (case, replace(case, **TO_RANK_0)):
        ranks(cases.normal_mode, case.world_size, each, with_topk, asynchronous, is_bounded)


@pytest.mark.parametrize(
    ("changes", "with_hook", "repeated"),
    [
        ({"quant_type": "none", "hidden_dim": 64}, True, True),
        ({}, False, False),
        ({"scale_format": "float32_power_of_two", "num_steps": 1}, True, False),
        ({"scale_format": "ue8m0", "num_steps": 1}, False, False),
    ],
    ids=["bf16", "fp8", "rounded", "ue8m0"],
)
def test_low_latency(ranks: Any, changes: dict[str, Any], with_hook: bool, repeated: bool) -> None:
    for more in (changes, changes | TO_RANK_0):
        ranks(cases.low_latency, 2, replace(LOW_LATENCY, **more), with_hook, repeated)


FOUR = {"world_size": 4, "num_experts": 8, "tokens": ((3, 0, 2, 1),), "num_steps": 1}


def test_four_ranks(ranks: Any) -> None:
    ranks(cases.normal_mode, 4, replace(NORMAL, **FOUR), True, False)
    ranks(cases.low_latency, 4, replace(LOW_LATENCY, **FOUR, max_tokens=3, hidden_dim=128), False, False)


TRANSPORTS = ("peer_memory", "torch.distributed", "nvshmem")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_normal_mode_between_nodes(ranks: Any, transport: str) -> None:
    four = replace(NORMAL, **FOUR, num_nodes=2)
    ranks(over, 4, transport, cases.normal_mode, four, True, True)
    ranks(over, 4, transport, cases.normal_mode, fp8(four), False, False)
    ranks(over, 2, transport, cases.normal_mode, replace(BOUNDED, num_nodes=2), True, False, True)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", ["any_order", "growing_batches"])
def test_normal_calls_between_nodes(ranks: Any, body: str, transport: str) -> None:
    ranks(over, 2, transport, getattr(cases, body), replace(NORMAL, num_nodes=2))


@pytest.mark.parametrize("transport", TRANSPORTS[:2])
def test_low_latency_between_nodes(ranks: Any, transport: str) -> None:
    four = replace(LOW_LATENCY, **FOUR, max_tokens=3, hidden_dim=128, num_nodes=2)
    ranks(over, 4, transport, cases.low_latency, four, True, True)
    if transport == "torch.distributed":
        for body in (cases.hooks, cases.overwritten_rows):
            ranks(over, 2, transport, body, replace(LOW_LATENCY, hidden_dim=128, num_nodes=2))
        ranks(over, 2, transport, cases.refusals, replace(NORMAL, num_nodes=2))


def test_weights_that_puts_do_not_carry(ranks: Any) -> None:
    ranks(over, 2, "nvshmem", cases.weights_out_of_reach, replace(LOW_LATENCY, num_nodes=2))


def test_nodes_that_cannot_be(ranks: Any) -> None:
    ranks(cases.odd_nodes, 4, replace(NORMAL, **FOUR))


@pytest.mark.parametrize("body", ["any_order", "growing_batches", "what_a_communication_stream_reads", "refusals"])
def test_normal_calls(ranks: Any, body: str) -> None:
    ranks(getattr(cases, body), 2, NORMAL)


@pytest.mark.parametrize("body", ["hooks", "overwritten_rows"])
def test_low_latency_calls(ranks: Any, body: str) -> None:
    ranks(getattr(cases, body), 2, replace(LOW_LATENCY, hidden_dim=128))
