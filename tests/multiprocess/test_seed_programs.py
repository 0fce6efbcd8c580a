"""Every program that the documents print runs on CPU ranks."""

from collections.abc import Iterator

import pytest

from ep_a2a.testing import RankPool, run_ranks
from tests.cases import seed_programs
from tests.cases.staged_cases import over
from tests.ports import free_port

QUANT_TYPES = ("per_Token", "per_128x128")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of their own: the programs leave and make the default group."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture
def port() -> str:
    """The first of two."""
    return str(free_port(2))


def test_the_complete_example_of_mori(pool, port):
    pool.run(seed_programs.complete_example, port)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("program", ["ep_group", "sections", "direct"])
def test_the_guide_of_aiter(pool, port, program, quant_type):
    pool.run(getattr(seed_programs, program), port, quant_type)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_the_guides_own_size(port, quant_type):
    """World 8, 16 experts, top-2: the size of AITER's own test."""
    run_ranks(seed_programs.sections, 8, port, quant_type)


def test_the_guide_between_nodes(port):
    """gpu_per_node rehearses it on one host."""
    run_ranks(seed_programs.sections, 4, port, "per_Token", 2)


def test_the_low_latency_layer(pool, port, tmp_path):
    pool.run(seed_programs.low_latency, port, str(tmp_path))


@pytest.mark.parametrize("transport", ["peer_memory", "torch.distributed"])
def test_the_low_latency_layers_own_proportions(port, tmp_path, transport):
    """Four nodes, as the printed 32 ranks of which 8 are on a node; 2 here."""
    run_ranks(over, 8, transport, seed_programs.low_latency, port, str(tmp_path), 4)
