"""Turns of engines that are measured one after another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from unittest import mock

from tests.engines.vllm.gpu import rank
from tests.engines.vllm.gpu.rank import Turns

if TYPE_CHECKING:
    from pathlib import Path

NUM_ENGINES = 3
NUM_ACTIONS = 4


def act(folder: Path, place: int, done: list[tuple[int, int]], last_of_second: int) -> None:
    """An engine's life: the second one ends early, as the process that has started it says with a file."""
    turns = Turns(str(folder), place, NUM_ENGINES)
    turns.wait_to_start()
    if last_of_second or place != 1:
        turns.wait_until_all_have_started()
        for number in range(last_of_second if place == 1 else NUM_ACTIONS):
            turns.wait()
            done.append((number, place))
            turns.give()
    if place == 1:
        (folder / "ended.1").touch()


def run(folder: Path, last_of_second: int) -> list[tuple[int, int]]:
    done: list[tuple[int, int]] = []
    with mock.patch.object(rank, "APART_SECS", 0.01), ThreadPoolExecutor(NUM_ENGINES) as pool:
        for place in range(NUM_ENGINES):
            pool.submit(act, folder, place, done, last_of_second)
    return done


def test_they_act_in_turn(tmp_path: Path) -> None:
    assert run(tmp_path, NUM_ACTIONS) == [(number, place) for number in range(NUM_ACTIONS) for place in (0, 1, 2)]


def test_the_others_go_on_without_one_that_ends(tmp_path: Path) -> None:
    for last in (0, 2):
        folder = tmp_path / str(last)
        folder.mkdir()
        places = ((0, 1, 2) if number < last else (0, 2) for number in range(NUM_ACTIONS))
        assert run(folder, last) == [(number, place) for number, each in enumerate(places) for place in each]
