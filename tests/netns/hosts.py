"""Bounds of tests on several hosts, and the cut of a host's link in the middle of one."""

import time
from pathlib import Path

from tests.netns.launch import signal
from tests.netns.network import Network
from tests.waiting import await_file, await_until

START_SECS = 100.0
TIMEOUT_SECS = 30.0
SHORT_TIMEOUT_SECS = 10.0
CUT_SENDS = 5
"""A cut ends when a host has sent the same bytes so often: TCP repeats itself after 0.2 s, 0.4 s and so on."""
SLACK_SECS = 8.0


def cut(network: Network, directory: Path, host: int, num_sends: int = 0) -> None:
    """Cuts a host off once every rank is ready: until it has sent something `num_sends` times, or for good if 0."""
    for rank in range(network.num_hosts):
        await_file(directory / f"ready_{rank}", patience_secs=START_SECS)
    network.cut(host)
    signal(directory, "cut")
    if num_sends:
        await_until(lambda: network.num_sent_in_vain >= num_sends, f"host {host} sends {num_sends} times")
        network.joined_at = time.monotonic()
        network.cut()


def wait_for_cut(directory: Path, rank: int) -> None:
    """Says that this rank is ready, and returns when a host has been cut off."""
    signal(directory, f"ready_{rank}")
    await_file(directory / "cut", patience_secs=START_SECS)
