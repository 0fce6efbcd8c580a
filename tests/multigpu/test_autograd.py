"""Gradients of exchanges on GPUs: the bodies of tests/multiprocess, and a captured forward and backward."""

from typing import Any

import pytest

from tests.cases import autograd_cases as cases
from tests.multiprocess.test_autograd import (  # noqa: F401
    test_against_the_dense_layer,
    test_casts_of_forward_only,
    test_checkpoints,
    test_compiled_once,
    test_in_one_graph,
    test_slots_have_equal_bits_at_any_ep_size,
    test_special,
    test_two_layers_and_an_unused_dispatch,
)


@pytest.mark.usefixtures("compiled_whole")
def test_in_a_cuda_graph(ranks: Any) -> None:
    ranks(cases.captured, 2)
