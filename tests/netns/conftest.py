"""Skips tests where this machine cannot have hosts of their own networks."""

import pytest

from tests.netns.network import why_impossible


@pytest.fixture(autouse=True, scope="session")
def _hosts_are_possible() -> None:
    reason = why_impossible()
    if reason is not None:
        pytest.skip(reason)
