"""Every program that the documents print, on two GPUs or on one that two ranks share."""

from collections.abc import Iterator

import pytest

from ep_a2a.testing import RankPool, run_ranks
from tests.cases import seed_programs
from tests.cases.staged_cases import over
from tests.markers import needs_gpus
from tests.multigpu.used_variants import compiled_when_used
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


@needs_gpus(8)
def test_the_low_latency_layers_own_proportions(port, tmp_path):  # noqa: F811
    """Four virtual nodes of two ranks; kernels compile when they are launched, since an op of 8 ranks has many."""
    body = seed_programs.low_latency
    run_ranks(over, 8, "peer_memory", compiled_when_used, body, port, str(tmp_path), 4, device="cuda")
