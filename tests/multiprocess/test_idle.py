"""A rank that brings nothing, receives nothing, or both, at every door."""

import pytest

from tests.cases.idle_cases import FORMS, idle


@pytest.mark.parametrize("form", FORMS)
def test_an_idle_rank(ranks, form):
    ranks(idle, 2, form)
