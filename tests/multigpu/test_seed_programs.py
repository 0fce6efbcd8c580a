"""Every program that the documents print, on two GPUs or on one that two ranks share."""

from collections.abc import Iterator

import pytest

from ep_a2a.testing import RankPool
from tests.multiprocess.test_seed_programs import (  # noqa: F401
    port,
    test_the_complete_example_of_mori,
    test_the_guide_of_aiter,
    test_the_low_latency_layer,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, device="cuda") as pool:
        yield pool
