"""Traces of layers on GPUs: the bodies of tests/multiprocess, and that the clocks are taken well."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_a2a.testing import RankContext
from tests.cases.low_latency_cases import BASE, CASES
from tests.cases.profiling_cases import check_traces, layer_without_profiling, profiled_layer


@pytest.mark.parametrize("name", ["bf16", "fp8", "many tokens"])
def test_traces_of_a_layer(ranks: Any, name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], tokens=((3, 2),))
    ranks(profiled_layer, case.world_size, case, tmp_path / "prof")
    check_traces(tmp_path / "prof", case.world_size, "cuda", is_bulk=name == "many tokens")


def test_without_profiling(ranks: Any, tmp_path: Path) -> None:
    ranks(layer_without_profiling, BASE.world_size, BASE, tmp_path / "prof")


def true_offsets(context: RankContext) -> list[tuple[int, int]]:
    """Bounds of the clock's offset, of two measurements."""
    from ep_a2a.telemetry.profiler import clock_offset

    found = [clock_offset(context.device) for _ in range(2)]
    return [(offset_ns - width_ns, offset_ns) for offset_ns, width_ns in found]


def test_clocks(ranks: Any) -> None:
    """However long a GPU that others use too lets the host wait, both measurements hold the true offset."""
    for first, second in ranks(true_offsets, 2):
        assert max(first[0], second[0]) <= min(first[1], second[1])
