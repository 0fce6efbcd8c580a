"""The seeds of random runs. CI repeats a few; `make seeds` draws others, and more."""

import os

FIRST_SEED = int(os.environ.get("EP_A2A_TEST_FIRST_SEED", "1"))
TIMES = int(os.environ.get("EP_A2A_TEST_SEEDS", "1"))
"""How many times as many runs there are as in CI."""


def seeds(number: int) -> range:
    """As many seeds, or times that."""
    return range(FIRST_SEED, FIRST_SEED + number * TIMES)
