"""Programs written for MORI on GPUs."""

from tests.multiprocess.test_mori import (  # noqa: F401
    test_addresses,
    test_calls,
    test_fewer_rows,
    test_halves,
    test_the_complete_program,
)
