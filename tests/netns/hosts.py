"""Bounds of tests on several hosts, and the cut of a host's link in the middle of one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.netns.launch import signal, wait_for_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.netns.network import Network

START_SECS = 100.0
TIMEOUT_SECS = 30.0
SHORT_TIMEOUT_SECS = 10.0
CUT_SECS = 2.0
SLACK_SECS = 8.0


def cut(network: Network, directory: Path, host: int, secs: float | None = None) -> None:
    """Cuts a host off once every rank has signalled that it is ready, for good without `secs`."""
    for rank in range(network.num_hosts):
        wait_for_file(directory / f"ready_{rank}", START_SECS)
    network.cut(host)
    partial = directory / "cut.partial"
    partial.write_text(str(time.monotonic()))
    partial.rename(directory / "cut")
    if secs is not None:
        time.sleep(secs)
        network.cut()


def wait_for_cut(directory: Path, rank: int) -> float:
    """Says that this rank is ready; the time.monotonic() of the cut, which the hosts of one machine share."""
    signal(directory, f"ready_{rank}")
    wait_for_file(directory / "cut", START_SECS)
    return float((directory / "cut").read_text())
