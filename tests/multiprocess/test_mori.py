"""Programs written for MORI on CPU ranks, under the name mori."""

import pytest

from tests.cases import mori_programs


def test_the_complete_program(ranks):
    ranks(mori_programs.complete_program, 2)


@pytest.mark.parametrize("kernel_type", ["AsyncLL", "IntraNode"])
def test_halves(ranks, kernel_type):
    ranks(mori_programs.halves, 2, kernel_type)


@pytest.mark.parametrize("body", ["rows_are_missing", "what_is_refused", "a_dtype_per_call"])
def test_calls(ranks, body):
    ranks(getattr(mori_programs, body), 2)


def test_addresses(ranks):
    ranks(mori_programs.addresses, 2)


@pytest.mark.parametrize(("kernel_type", "gpu_per_node"), [("IntraNode", 8), ("InterNodeV1LL", 1)])
def test_fewer_rows(ranks, kernel_type, gpu_per_node):
    ranks(mori_programs.fewer_rows_than_received_buffer, 2, kernel_type, gpu_per_node)
