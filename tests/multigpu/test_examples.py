"""The examples and the demo on GPUs."""

import json

import pytest
import torch

from tests.integration.programs import EXAMPLES, run_cli, run_example, succeeded
from tests.markers import needs_own_gpus, ranks_on_gpus


def num_ranks() -> int:
    """Ranks to start: a power of two, which divides the examples' experts."""
    return 1 << (ranks_on_gpus(8).bit_length() - 1)


NEED_NCCL = ("deep_ep_example",)
"""DeepEP's normal mode exchanges its counts over NCCL."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_own_gpus(2)] if name in NEED_NCCL else []) for name in EXAMPLES]
)
def test_example(name: str) -> None:
    succeeded(run_example(name, "--device", "cuda", "--ranks", str(num_ranks())))


@pytest.mark.parametrize(
    ("backend", "quant"),
    [
        ("ep_a2a", "none"),
        ("ep_a2a", "fp8_per_token"),
        pytest.param("naive", "fp8_per_1x128", marks=needs_own_gpus(2)),
        pytest.param("allgather_reducescatter", "fp8_per_1x128", marks=needs_own_gpus(2)),
    ],
)
def test_demo(backend: str, quant: str) -> None:
    sizes = ("--tokens", "512", "--hidden", "2048", "--experts", "32", "--topk", "8")
    arguments = ("--device", "cuda", "--ranks", str(num_ranks()), "--backend", backend, "--quant", quant, "--json")
    report = json.loads(succeeded(run_cli("demo", *arguments, *sizes)))
    assert report["matches"] is True
    assert report["ranks"] == num_ranks()
    assert ("share" in report["note"]) == (torch.cuda.device_count() == 1)
    assert report["device"] == "cuda"


def test_demo_takes_gpus_by_itself() -> None:
    assert json.loads(succeeded(run_cli("demo", "--json")))["device"] == "cuda"
