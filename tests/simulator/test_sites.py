"""Every place that orders accesses is needed: without its order a run of the simulator fails.

The runs also show what the memory of the simulator notices: late stores and old loads (wrong values), loads that a
store overtakes, of other programs and of its own, and atomics of two scopes. test_steps.py shows what it allows.

`python -m tests.simulator [PART]` searches the runs of this table anew.
"""

from dataclasses import replace

import pytest

from tests.simulator.runs import CONDITIONS, SimulationFailed, run
from tests.simulator.sites import ordering_sites

BEHIND_FLAGS = "what is read has been acquired before, so that any load sees it"
ANOTHER_BARRIER = "another barrier, or a reduction over all threads, always lies between the same accesses"
RESIDENCY = "it orders no accesses: no thread may wait for another rank once the next launch takes places"
RECORD = "the host reads the record of a failure only when the launch has ended"
CLOCK = "it orders a look at the clock, not at memory"
RELEASED_LATER = (
    "its program's share of the step releases it; only a program that fails has none (device-failures-look-back)"
)
HOST = "hosts alone write what it reads, and their stores are not delayed here"
LAUNCH_ENDS = "its launch waits for nobody, and what it stores lands when it ends"

SITES = {site.key: site for site in ordering_sites()}
NOTICED_BY: dict[str, tuple[str, str, str]] = {
    "bulk_dispatch_kernels.bulk_dispatch_kernel wait 0": ("bulk_compact", "chain", "late"),
    "bulk_dispatch_kernels.send_by_tiles barrier 0": ("bounded", "steps", "many-sms"),
    "combine_kernels.combine_kernel wait 0": ("low_latency_compact", "chain", "late"),
    "combine_receive_kernels.load_result volatile 0": ("low_latency", "steps", "late"),
    "combine_send_kernels.store_result wt 0": ("low_latency", "steps", "late"),
    "combine_time_weights_kernels.push_weights wt 0": ("expert_major", "late_weights", "late"),
    "combine_time_weights_kernels.await_words volatile 0": ("expert_major", "late_weights", "random"),
    "combine_time_weights_kernels.await_words volatile 1": ("expert_major", "late_weights", "late"),
    "ll_send_kernels.push wt 0": ("low_latency", "steps", "late"),
    "ll_send_kernels.push_beside wt 0": ("low_latency", "steps", "late"),
    "ll_send_kernels.push_position barrier 0": ("low_latency_marks", "steps", "late"),
    "ll_send_kernels.push_position scope 0": ("low_latency_marks", "steps", "late"),
    "ll_send_kernels.push_position sem 0": ("low_latency_marks", "steps", "late"),
    "ll_send_kernels.push_position wt 0": ("low_latency", "steps", "late"),
    "ll_dispatch_kernels.ll_dispatch_kernel wait 0": ("low_latency_compact", "chain", "late"),
    "ll_receive_kernels.read_beside volatile 0": ("low_latency", "steps", "late"),
    "ll_receive_kernels.take_row_block volatile 1": ("low_latency", "steps", "late"),
    "ll_receive_kernels.take_row_block scope 0": ("low_latency_marks", "steps", "fresh-looks"),
    "ll_receive_kernels.take_row_block sem 0": ("low_latency_marks", "steps", "fresh-looks"),
    "ll_receive_kernels.take_row_block barrier 0": ("low_latency_marks", "steps", "late"),
    "primitives.arrive_last barrier 0": ("staged", "steps", "late"),
    "primitives.arrive_last scope 0": ("staged", "steps", "late"),
    "primitives.arrive_last sem 0": ("staged", "steps", "late"),
    "primitives.post_arrival barrier 0": ("bounded", "steps", "late"),
    "primitives.post_arrival scope 0": ("bounded", "steps", "late"),
    "primitives.post_arrival sem 0": ("bounded", "steps", "late"),
    "primitives.post_all barrier 0": ("low_latency", "steps", "late"),
    "primitives.post_all scope 0": ("low_latency", "steps", "late"),
    "primitives.post_all sem 0": ("low_latency", "steps", "late"),
    "primitives.post_all scope 1": ("low_latency", "chain", "late"),
    "primitives.late_lanes scope 0": ("low_latency", "steps", "late"),
    "primitives.late_lanes sem 0": ("bulk", "steps", "late"),
    "primitives.late_lanes scope 1": ("low_latency", "chain", "late"),
    "receive_kernels.post_counts wt 0": ("low_latency", "steps", "late"),
    "receive_kernels.post_counts wt 1": ("low_latency", "steps", "late"),
    "receive_kernels.post_counts wt 2": ("bulk_compact", "steps", "late"),
    "receive_kernels.post_counts wt 3": ("low_latency", "steps", "late"),
    "receive_kernels.look_at_counts volatile 0": ("low_latency", "steps", "late"),
    "receive_kernels.counts_from volatile 0": ("low_latency", "steps", "late"),
    "receive_kernels.counts_from volatile 1": ("low_latency_strides", "steps", "late"),
    "receive_kernels.counts_from volatile 2": ("low_latency", "disagreeing", "late"),
    "receive_kernels.rows_before volatile 0": ("bulk_compact", "steps", "late"),
    "ring_combine_kernels.take_chunk scope 0": ("rings", "steps", "late"),
    "ring_combine_kernels.take_chunk sem 0": ("rings", "steps", "late"),
    "ring_combine_kernels.take_chunk barrier 0": ("rings", "steps", "late"),
    "ring_forward_kernels.end_stream scope 0": ("rings_of_a_step", "steps", "late"),
    "ring_forward_kernels.end_stream sem 0": ("rings", "steps", "late"),
    "ring_forward_kernels.end_stream scope 1": ("rings", "steps", "late"),
    "ring_forward_kernels.end_stream sem 1": ("rings", "steps", "late"),
    "ring_kernels.has_reached scope 0": ("rings", "steps", "late"),
    "ring_kernels.has_reached sem 0": ("rings", "steps", "late"),
    "ring_kernels.raise_counter barrier 0": ("rings", "steps", "late"),
    "ring_kernels.raise_counter scope 0": ("rings", "steps", "late"),
    "ring_kernels.raise_counter sem 0": ("rings", "steps", "late"),
    "ring_kernels.raise_at_node barrier 0": ("rings_by_puts", "steps", "late"),
    "ring_kernels.before_reading volatile 0": ("rings_by_puts", "steps", "late"),
    "ring_kernels.give_room_to_all barrier 0": ("rings_of_one_chunk", "steps", "late"),
    "ring_kernels.give_room_to_all scope 0": ("rings_of_one_chunk", "steps", "late"),
    "ring_kernels.give_room_to_all sem 0": ("rings_of_one_chunk", "steps", "late"),
    "routing_kernels.rows_of_programs_before volatile 1": ("bulk_look_back", "steps", "late"),
    "ll_receive_kernels.take_row_block volatile 0": ("low_latency_marks", "steps", "late"),
    "primitives.wait_all barrier 0": ("bulk", "steps", "late"),
    "routing_kernels.rows_of_programs_before volatile 0": ("bulk_look_back", "steps", "random"),
    "ll_receive_kernels.take_row_block volatile 2": ("low_latency_sparse", "steps", "late"),
    "primitives.load_poison volatile 0": ("small_room", "without_room", "late"),
    "primitives.fail scope 1": ("small_room", "without_room", "late"),
    "primitives.overdue scope 0": ("low_latency", "until_late", "stopping"),
    "receive_kernels.absent_ranks volatile 0": ("rings", "steps", "pausing"),
    "staged_kernels.pass_on_flags barrier 0": ("staged", "steps", "late"),
    "staged_kernels.pass_on_flags scope 0": ("staged", "steps", "late"),
    "staged_kernels.pass_on_flags sem 0": ("staged", "steps", "late"),
    "staged_kernels.raise_flags scope 0": ("staged", "steps", "late"),
    "staged_kernels.raise_flags sem 0": ("staged", "steps", "late"),
    "primitives.poison_of scope 0": ("small_room_staged", "behind_failure", "late"),
    "staged_kernels.pass_on_kernel scope 0": ("small_room_staged", "behind_failure", "late"),
    "staged_kernels.post_failure_kernel scope 0": ("staged", "until_late", "stopping-later"),
}
"""By site: case, body and conditions of a run that fails when the site has lost its order."""
NOT_NOTICED = {
    "combine_kernels.await_peers volatile 0": BEHIND_FLAGS,
    "ll_receive_kernels.take_row_block volatile 3": BEHIND_FLAGS,
    "primitives.finish_stage barrier 0": RESIDENCY,
    "primitives.fail barrier 0": RECORD,
    "primitives.fail scope 0": HOST,
    "primitives.masked_now scope 0": HOST,
    "receive_kernels.accept_rows barrier 0": ANOTHER_BARRIER,
    "ring_forward_kernels.end_stream barrier 0": ANOTHER_BARRIER,
    "ring_forward_kernels.end_stream barrier 1": ANOTHER_BARRIER,
    "ring_kernels.store_channel barrier 0": ANOTHER_BARRIER,
    "routing_kernels.rows_of_programs_before wt 0": RELEASED_LATER,
    "span_kernels.note_time barrier 0": CLOCK,
    "staged_kernels.pass_on_counts wt 0": LAUNCH_ENDS,
    "staged_kernels.pass_on_counts wt 1": LAUNCH_ENDS,
    "staged_kernels.raise_flags barrier 0": ANOTHER_BARRIER,
}
"""Sites whose order no run misses, with the reason."""


def test_each_site_is_in_one_table():
    assert not NOTICED_BY.keys() & NOT_NOTICED.keys()
    assert NOTICED_BY.keys() | NOT_NOTICED.keys() == SITES.keys()


@pytest.mark.parametrize("key", NOTICED_BY)
def test_a_site_without_its_order_is_noticed(key):
    # with its order the same run is right: test_steps.py
    case, body, name = NOTICED_BY[key]
    with pytest.raises(SimulationFailed):
        run(case, body, replace(CONDITIONS[name], weakened=frozenset([SITES[key].place])))
