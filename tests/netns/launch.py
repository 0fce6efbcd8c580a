"""Runs a function on the ranks of several hosts."""

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
from tests.waiting import await_file


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
