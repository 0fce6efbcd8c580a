"""Skips tests where this machine cannot have hosts of their own networks."""

import shutil

import pytest

from tests.netns.network import Network


@pytest.fixture(autouse=True, scope="session")
def _hosts_are_possible() -> None:
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not installed")
    try:
        with Network(1):
            pass
    except OSError as error:
        pytest.skip(f"network namespaces with TAP devices: {error}")
