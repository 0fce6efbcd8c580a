"""The ATOM integration on CPU ranks, on modules with the shape of ATOM and AITER (tests/engines/atom)."""

import pytest

from tests.cases import atom_cases


@pytest.mark.parametrize("backend", ["", "ep_a2a", "allgather_reducescatter"])
def test_our_manager_by_the_setter(ranks, backend):
    ranks(atom_cases.our_manager_by_the_setter, 2, backend)


def test_aiters_manager_on_our_mori(ranks):
    ranks(atom_cases.aiters_manager_on_our_mori, 2)


@pytest.mark.parametrize("backend", ["ep_a2a", "allgather_reducescatter"])
def test_one_layer(ranks, backend):
    ranks(atom_cases.one_layer, 2, backend)


@pytest.mark.parametrize("body", ["overlapped_halves", "without_the_switch"])
def test_layers(ranks, body):
    ranks(getattr(atom_cases, body), 2)
