"""Starts the processes of engines as forks of one that has imported vLLM, so that none of them imports it again.

    python -m tests.engines.vllm.cpu.starter

A line of stdin is JSON of one run: the `model` and `options` of tests.engines.vllm.cpu.program; for each rank its
`result`, its whole environment, `variables`, and the file of all that it prints, `log`; which ranks are waited for,
`finishes`, before the others are killed; and for how long at most, `timeout_secs`. The answer is a line with the exit
codes, null for a rank that has not ended by itself.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.engines.vllm.cpu import program


def main() -> None:
    # what program.main imports first, and what vLLM imports later of torch
    for name in ("vllm.entrypoints.llm", "torch._inductor.standalone_compile"):
        importlib.import_module(name)
    while line := sys.stdin.readline():
        run = json.loads(line)
        processes = []
        for rank in run["ranks"]:
            process = os.fork()
            if process == 0:
                become(rank)
                program.main(run["model"], Path(rank["result"]), program.Options(**run["options"]))
                return
            processes.append(process)
        codes = wait(processes, run["finishes"], run["timeout_secs"])
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


def become(rank: dict[str, Any]) -> None:
    """Makes this process that of a rank: its session, environment and log."""
    os.setsid()
    os.environ.clear()
    os.environ.update(rank["variables"])
    with open(os.devnull, "rb") as nothing, open(rank["log"], "wb") as log:
        for theirs, ours in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(theirs.fileno(), ours)


def wait(processes: list[int], finishes: list[int], timeout_secs: float) -> list[int | None]:
    """Returns the exit codes once the ranks in `finishes` have ended, or stdin has; kills all sessions then."""
    deadline = time.monotonic() + timeout_secs
    codes: list[int | None] = [None] * len(processes)
    handles = {os.pidfd_open(processes[rank]): rank for rank in finishes}
    poll = select.poll()
    # the end of stdin is reported unasked
    poll.register(sys.stdin, 0)
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while handles and (events := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for handle, _ in events:
            if handle not in handles:
                handles.clear()
                break
            rank = handles.pop(handle)
            poll.unregister(handle)
            os.close(handle)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(processes[rank], 0)[1])
    for process, code in zip(processes, codes):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if code is None:
            os.waitpid(process, 0)
    return codes


if __name__ == "__main__":
    main()
