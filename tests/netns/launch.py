"""Runs a function on the ranks of several hosts, and cuts a host's link in the middle of it."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.netns.host import Job
from tests.netns.network import DEVICE, Network
from tests.waiting import await_file, await_until

START_SECS = 100.0
TIMEOUT_SECS = 30.0
SHORT_TIMEOUT_SECS = 10.0
CUT_SENDS = 5
"""A cut ends when a host has sent the same bytes so often: TCP repeats itself after 0.2 s, 0.4 s and so on."""
SLACK_SECS = 8.0


def run_on_hosts(
    network: Network,
    directory: Path,
    function: Callable[..., Any],
    ranks_per_host: int,
    *arguments: Any,
    meanwhile: Callable[[], None] = lambda: None,
    timeout_secs: float = 120.0,
) -> list[Any]:
    """`function(context, directory, *arguments)` on all ranks; the results in rank order.

    The store is on the last host, so that rank 0 reaches it over the network.

    Args:
        network: the hosts.
        directory: an empty folder for this run; ranks and `meanwhile` may signal each other there.
        function: importable by name.
        ranks_per_host: ranks on each host.
        arguments: anything JSON can hold.
        meanwhile: called here while the ranks run.
        timeout_secs: after this the run has failed.
    """
    last = network.num_hosts - 1
    job = Job(
        f"{function.__module__}:{function.__name__}",
        list(arguments),
        network.num_hosts,
        ranks_per_host,
        store_host=last,
        store_address=network.address(last),
        directory=str(directory),
    )
    deadline = time.monotonic() + timeout_secs
    with _hosts(network, job):
        meanwhile()
        for rank in range(job.world_size):
            await_file(job.result_path(rank), patience_secs=deadline - time.monotonic())
    results = [pickle.loads(job.result_path(rank).read_bytes()) for rank in range(job.world_size)]
    failures = [f"--- rank {rank} ---\n{value}" for rank, (kind, value) in enumerate(results) if kind == "failure"]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def signal(directory: Path, name: str) -> None:
    """Lets whoever waits for this name go on, on any host."""
    (directory / name).touch()


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


@contextlib.contextmanager
def _hosts(network: Network, job: Job) -> Iterator[None]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(job.num_hosts):
            command = network.command(host, [sys.executable, "-m", "tests.netns.host", str(host), job.to_text()])
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True))
        yield
    finally:
        for process in processes:
            # its ranks are of the same session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.communicate()
