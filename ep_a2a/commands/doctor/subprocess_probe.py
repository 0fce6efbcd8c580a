"""Runs the programs `probe_*.py` and `ep-a2a plan`, each with a time limit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ep_a2a.commands.programs import command_output

MARK = "ep_a2a_facts:"


def run_probe(name: str, timeout_secs: float, *arguments: str) -> dict[str, Any]:
    """Returns the facts that `probe_<name>.py` prints; where it prints none, `problem` says why.

    Args:
        name: torch, triton, driver or backend.
        timeout_secs: seconds to wait.
        arguments: of the program.
    """
    program = Path(__file__).with_name(f"probe_{name}.py")
    # -P: this folder must not be on the import path, where its modules could stand for others.
    flags = ["-P"] + ["-S"] * bool(sys.flags.no_site) + ["-E"] * bool(sys.flags.ignore_environment)
    try:
        done = subprocess.run(
            [sys.executable, *flags, str(program), *arguments], capture_output=True, text=True, errors="replace",
            timeout=timeout_secs, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"version": "?", "problem": f"it had not answered within {timeout_secs:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line[len(MARK) :])
            return found
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing on stderr")
    return {"version": "?", "problem": f"the process {_end(done.returncode)}: {last.strip()}"}


def plan_bytes(num_ranks: int, max_tokens: int, hidden_dim: int | None, quant: str) -> int | None:
    """Returns the bytes of an op on each rank, as `ep-a2a plan` says; None where it fails or refuses the sizes."""
    options = {"ranks": num_ranks, "max-tokens": max_tokens, "hidden": hidden_dim, "quant": quant}
    named = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    printed = command_output(sys.executable, "-m", "ep_a2a.cli", "plan", "--json", *named)
    return int(json.loads(printed)["bytes_per_gpu"]["total"]) if printed else None


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
