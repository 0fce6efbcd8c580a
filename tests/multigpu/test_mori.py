"""Programs written for MORI on GPUs: the bodies of tests/multiprocess/test_mori.py."""

from typing import Any

import pytest

from tests.cases import mori_programs
from tests.markers import needs_gpus


@pytest.mark.parametrize(
    "body",
    [
        "complete_program",
        "rows_are_missing",
        "what_is_refused",
        "a_dtype_per_call",
        "addresses",
    ],
)
def test_program(ranks: Any, body: str) -> None:
    ranks(getattr(mori_programs, body), 2, device="cuda")


@pytest.mark.parametrize("kernel_type", ["AsyncLL", "IntraNode"])
def test_halves(ranks: Any, kernel_type: str) -> None:
    ranks(mori_programs.halves, 2, kernel_type, device="cuda")


@pytest.mark.parametrize(
    ("world_size", "kernel_type", "gpu_per_node"),
    [(2, "IntraNode", 8), pytest.param(4, "InterNodeV1LL", 2, marks=needs_gpus(4))],
)
def test_fewer_rows(ranks: Any, world_size: int, kernel_type: str, gpu_per_node: int) -> None:
    ranks(mori_programs.fewer_rows_than_received_buffer, world_size, kernel_type, gpu_per_node, device="cuda")
