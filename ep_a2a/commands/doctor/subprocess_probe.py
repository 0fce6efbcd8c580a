"""Runs probe_programs.py and `ep-a2a plan`, each with a time limit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ep_a2a.commands.doctor.probe_programs import MARK
from ep_a2a.commands.programs import command_output

PROBE_SECS = 120.0
"""Seconds that a program may take which imports libraries: the first import of torch from a network drive is slow."""


def run_probe(name: str, timeout_secs: float, *arguments: str) -> dict[str, Any]:
    """Returns the facts that a probe prints, with tuples for lists; where it prints none, `problem` says why.

    Args:
        name: torch, triton, driver, declaration, library or sharing.
        timeout_secs: seconds to wait.
        arguments: of the probe.
    """
    program = Path(__file__).with_name("probe_programs.py")
    # -P: this folder must not be on the import path, where its modules could stand for others.
    flags = ["-P"] + ["-S"] * bool(sys.flags.no_site) + ["-E"] * bool(sys.flags.ignore_environment)
    try:
        done = subprocess.run(
            [sys.executable, *flags, str(program), name, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_secs,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"version": "?", "problem": f"it had not answered within {timeout_secs:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return {key: _tuples(value) for key, value in json.loads(line[len(MARK) :]).items()}
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing on stderr")
    return {"version": "?", "problem": f"the process {_end(done.returncode)}: {last.strip()}"}


def plan_bytes(num_ranks: int, max_tokens: int, hidden_dim: int | None, quant: str) -> int | None:
    """Returns the bytes of an op on each rank, as `ep-a2a plan` says; None where it fails or refuses the sizes."""
    options = {"ranks": num_ranks, "max-tokens": max_tokens, "hidden": hidden_dim, "quant": quant}
    named = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    # -P: `python -m` would put the current folder on the import path, and run what lies there
    command = [sys.executable, "-P", "-m", "ep_a2a.cli", "plan", "--json", *named]
    printed = command_output(*command, timeout_secs=PROBE_SECS)
    return int(json.loads(printed)["bytes_per_gpu"]["total"]) if printed else None


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"
