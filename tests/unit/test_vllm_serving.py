"""How servers of vLLM are started, measured in turn and summed up, without vLLM."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.vllm import serving


class Fake(serving.Candidate):
    """A server that is up, or ends at once."""

    def __init__(self, options: argparse.Namespace, backend: str) -> None:
        self.backend, self.url = backend, ""

    def is_up(self) -> bool:
        return not self.has_ended()

    def has_ended(self) -> bool:
        return self.backend == "broken"

    def last_words(self) -> str:
        return "why it ended"

    def end(self) -> None:
        """Nothing was started."""


def test_servers_are_measured_in_turn_and_one_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[tuple[int, str, str]] = []
    pauses: list[float] = []

    def measured(_: Any, server: serving.Candidate, workload: serving.Workload, number: int) -> dict[str, Any] | None:
        turns.append((number, workload.name, server.backend))
        if server.backend == "dies" and number:
            return None
        # round 0 is slow, since it compiles
        return {"backend": server.backend, "workload": workload.name} | dict.fromkeys(
            serving.FIGURES, (100, 10, 20)[number]
        )

    monkeypatch.setattr(serving, "start", Fake)
    monkeypatch.setattr(serving, "measured", measured)
    monkeypatch.setattr(serving.time, "sleep", pauses.append)
    options = ("--backends", "ours,broken,dies", "--rounds", "2", "--workloads", "a:1x2x3,b:1x2x3")
    words = [*options, "--folder", str(tmp_path / "x")]
    monkeypatch.setattr(sys, "argv", ["serving", *words])
    assert serving.main() == 0
    first = [(0, name, backend) for name in "ab" for backend in ("ours", "dies")]
    assert turns == [*first, (1, "a", "ours"), (1, "a", "dies"), (1, "b", "ours"), (2, "a", "ours"), (2, "b", "ours")]
    assert pauses.count(serving.SETTLE_SECS) == len(turns)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["broken has ended:", "why it ended"]
    assert [json.loads(line)["workload"] for line in printed if line.startswith("{")] == ["a", "b", "a", "b"]
    assert printed[-1].startswith("| b | ours | 15 (10 to 20) |")
