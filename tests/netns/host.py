"""One host of a job: the process that starts the host's ranks, and the ranks."""

import importlib
import json
import multiprocessing
import os
import pickle
import sys
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.testing import RankContext

STORE_PORT = 29500
JOIN_TIMEOUT_SECS = 120.0


@dataclass(frozen=True)
class Job:
    """What all hosts are told.

    Attributes:
        function: "module:name", called as function(context, directory, *arguments) on every rank.
        arguments: anything JSON can hold.
        num_hosts, ranks_per_host: the job's shape; ranks are numbered host by host.
        store_host, store_address: where the TCP store is.
        directory: a folder that all hosts see, for results and signals.
    """

    function: str
    arguments: list[Any]
    num_hosts: int
    ranks_per_host: int
    store_host: int
    store_address: str
    directory: str

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def result_path(self, rank: int) -> Path:
        return Path(self.directory, f"result_{rank}")


def serve(host: int, job: Job) -> None:
    """Runs this host's ranks, and the store where it is this host's."""
    keep = _store(job, is_master=True) if host == job.store_host else None
    context = multiprocessing.get_context("spawn")
    first = host * job.ranks_per_host
    ranks = [context.Process(target=run_rank, args=(first + i, job), daemon=True) for i in range(job.ranks_per_host)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    # A store that ends would be a second failure for the ranks of other hosts.
    sys.stdin.read()
    del keep


def run_rank(rank: int, job: Job) -> None:
    """Joins, runs the function, and leaves its result, or its traceback, in a file."""
    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=JOIN_TIMEOUT_SECS)
        dist.init_process_group(
            "gloo", store=_store(job, is_master=False), rank=rank, world_size=job.world_size, timeout=timeout
        )
        group = dist.group.WORLD
        module, _, name = job.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        context = RankContext(rank, job.world_size, torch.device("cpu"), group)
        result: tuple[str, Any] = "value", function(context, Path(job.directory), *job.arguments)
    except BaseException:  # noqa: BLE001 - reported to the test, whatever it is
        result = "failure", traceback.format_exc()
    partial = job.result_path(rank).with_suffix(".partial")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(job.result_path(rank))
    # What a cut link has left pending would hold up an ordinary end.
    os._exit(0)


def _store(job: Job, *, is_master: bool) -> dist.TCPStore:
    timeout = timedelta(seconds=JOIN_TIMEOUT_SECS)
    return dist.TCPStore(job.store_address, STORE_PORT, is_master=is_master, timeout=timeout, wait_for_workers=False)


if __name__ == "__main__":
    serve(int(sys.argv[1]), Job(**json.loads(sys.argv[2])))
