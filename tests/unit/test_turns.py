"""Engines that are up at once act one after another."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.engines.vllm.gpu.rank import Turns

if TYPE_CHECKING:
    from pathlib import Path

NUM_ACTIONS = 4


def act(folder: Path, place: int, num_engines: int, done: list[tuple[int, int]]) -> None:
    turns, chosen = Turns(str(folder), place, num_engines), random.Random(place)
    for number in range(NUM_ACTIONS):
        time.sleep(0.02 * chosen.random())
        turns.wait()
        done.append((number, place))
        turns.give()
    turns.wait_for_all()
    assert len(done) == NUM_ACTIONS * num_engines


def test_engines_act_in_turn(tmp_path):
    done: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda place: act(tmp_path, place, 3, done), range(3)))
    assert done == [(number, place) for number in range(NUM_ACTIONS) for place in range(3)]


def test_an_engine_alone_waits_for_nobody(tmp_path):
    act(tmp_path, 0, 1, [])
