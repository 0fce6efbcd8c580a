"""Engines that are up at once act one after another."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.vllm.gpu.rank import Turns

NUM_ACTIONS = 4


def act(folder: Path, place: int, num_engines: int, done: list[tuple[int, int]], num_actions: int) -> None:
    """An engine's life. One that ends early is named by a file, which the process that has started it makes."""
    turns = Turns(str(folder), place, num_engines)
    if num_actions:
        turns.wait_until_all_have_started()
    for number in range(num_actions):
        turns.wait()
        done.append((number, place))
        turns.give()
    if num_actions < NUM_ACTIONS:
        (folder / f"ended.{place}").touch()
    else:
        turns.wait_for_all()
        assert {number for number, _ in done} == set(range(NUM_ACTIONS))


@pytest.mark.parametrize("actions", [[4], [4, 4, 4], [4, 0, 4], [4, 2, 4]], ids=str)
def test_engines_act_in_turn_and_without_those_that_have_ended(tmp_path: Path, actions: list[int]) -> None:
    done: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as pool:
        lives = [pool.submit(act, tmp_path, place, len(actions), done, number) for place, number in enumerate(actions)]
    for life in lives:
        life.result()
    assert done == [
        (number, place) for number in range(NUM_ACTIONS) for place, last in enumerate(actions) if number < last
    ]
