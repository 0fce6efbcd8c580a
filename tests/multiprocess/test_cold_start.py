"""tools/cold_start.py in the interpreter, which compiles nothing."""

from typing import Any

import pytest

from tools import cold_start


@pytest.mark.parametrize("what", ["forms", "vllm"])
def test_every_call_is_made(ranks: Any, what: str) -> None:
    for found in ranks(cold_start.first_calls, 1, what):
        assert found["secs"] == pytest.approx(found["build_secs"] + found["calls_secs"])
        assert found["kernels"] == found["compiled"] == 0
