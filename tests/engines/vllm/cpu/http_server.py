"""A server of vLLM in a process group of its own, as its HTTP clients see it."""

from __future__ import annotations

import contextlib
import subprocess
import urllib.request
from typing import TYPE_CHECKING

from tests.engines.vllm.cpu.processes import end_group
from tests.integration.programs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

HEALTH_TIMEOUT_SECS = 10
LOG_CHARS = 4000


class Server:
    """`command`, whose options make it listen at `port` of this host.

    Args:
        command: its words.
        variables: the whole environment.
        port: where `command` listens.
        log: the file that gets all that it prints.
    """

    def __init__(self, command: list[str], variables: dict[str, str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True
            )

    def is_up(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_TIMEOUT_SECS):
            return True
        return False

    def has_ended(self) -> bool:
        """Whether its first process has ended."""
        return self._process.poll() is not None

    def wait(self, timeout_secs: float) -> int:
        """Returns the exit code of its first process."""
        return self._process.wait(timeout_secs)

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-LOG_CHARS:]

    def end(self) -> None:
        """Kills all its processes."""
        end_group(self._process)
