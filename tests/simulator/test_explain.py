"""What a failure tells: the load that missed a store, the store, and why no order held."""

import gc
import re
import weakref
from dataclasses import replace

import pytest

from ep_a2a.memory.arena import Arena
from tests.simulator.ranks import Context
from tests.simulator.runs import CONDITIONS, SimulationFailed, run, run_on_ranks
from tests.simulator.sites import ordering_sites

SITES = {site.key: site for site in ordering_sites()}


def text_of(case: str, key: str) -> str:
    """What steps of a case print where a site has lost its order."""
    weakened = frozenset([SITES[key].place])
    with pytest.raises(SimulationFailed) as failed:
        run(case, "steps", replace(CONDITIONS["late"], weakened=weakened))
    return str(failed.value)


def test_a_store_that_no_release_covers_is_named():
    text = text_of("low_latency_marks", "ll_send_kernels.push_position barrier 0")
    # the schedule decides which rank is the first to look too early
    wrong = re.search(r"^The first wrong element is TOKENS of rank (\d) word \d+\.$", text, re.MULTILINE)
    assert wrong, text
    reader, writer = int(wrong[1]), 1 - int(wrong[1])
    store = rf"\d+: rank {writer} ll_dispatch\[\d\] of call 1: store past caches LOW_LATENCY_ROWS of rank {reader} word"
    load = rf"\d+: rank {reader} ll_dispatch.*: volatile load LOW_LATENCY_ROWS of rank {reader} word"
    for line in (
        rf"Its value comes from \d+: rank {reader} ll_dispatch.*: store TOKENS of rank {reader} .*.py:\d+ receive_row",
        rf"The load {load} \d+ .* take_row",
        rf"missed the store {store} \d+ .*, stored -?\d+, at ll_send_kernels.py:\d+ push$",
        r"The store had not landed: it did at operation \d+.",
        r"Behind the store, its program had .* release sys .* push_position; no barrier lies between.",
        r"Before the load, its program had .* acquire sys .* take_row_block; a barrier lies between.",
    ):
        assert re.search(line, text, re.MULTILINE), f"{line} not in\n{text}"
    # the trace ends with the load that missed the store
    missed = re.search(r"The load (\d+):", text)
    assert missed
    assert f"rank {reader}, its last operations up to operation {missed[1]}:" in text
    numbers = [int(each) for each in re.findall(r"^  (\d+): rank", text, re.MULTILINE)]
    assert max(numbers) == int(missed[1])


def test_a_plain_load_of_an_old_value_is_named():
    text = text_of("bulk_compact", "receive_kernels.rows_before volatile 0")
    wrong = re.search(r"The first wrong element is INDICES of rank \d word \d+\.", text)
    assert wrong, text
    # a program that has taken a count for 0 writes a row to another place
    writer = re.search(r"Its value comes from \d+: (rank \d bulk_dispatch\[\d\] of call 1): store INDICES", text)
    assert writer, text
    load = rf"\d+: {re.escape(writer[1])}: load COUNTS of rank \d word 0 .*, read 0"
    for line in (
        rf"The load {load}, at receive_kernels.py:\d+ rows_before",
        r"missed the store .* at receive_kernels.py:\d+ post_counts",
        r"The store had landed at operation \d+, and nothing orders it before the load.",
    ):
        assert re.search(line, text), f"{line} not in\n{text}"


def test_nothing_of_a_run_that_has_failed_is_kept() -> None:
    """A suite with many failures would take gigabytes."""
    groups = []

    def fail(context: Context) -> None:
        groups.append(weakref.ref(context.group))
        with Arena(context.group, context.device):
            raise ValueError

    with pytest.raises(SimulationFailed):
        run_on_ranks(fail, 2)
    gc.collect()
    assert [group() for group in groups] == [None, None]
