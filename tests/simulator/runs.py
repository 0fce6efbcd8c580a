"""Runs of the simulator by name, and what a failure prints."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.cases.op_cases import Case
from tests.simulator.cases import BODIES, CASES, LATE_RANK
from tests.simulator.explain import describe
from tests.simulator.ranks import Conditions, Outcome, Simulation
from tests.simulator.scheduler import Fault

TIMEOUT_SECS, MOST_SECS = 10.0, 100.0
"""Of the ops of named runs, and of a whole run, by the simulated clock: a wait in vain takes many polls."""
PAUSE_SECS, STOP_SECS = 0.7 * TIMEOUT_SECS, 5 * TIMEOUT_SECS
"""How long ranks stand still: less than others wait, and more, with the polls between two looks at the clock."""
CONDITIONS = {
    # what was stored last lands first, and as late as it may; loads return the oldest value that they may
    "late": Conditions(landing="newest", num_sms=4),
    # half of a row is there
    "halves": Conditions(num_sms=4, halves=True),
    "random-halves": Conditions(landing="random", num_sms=4, halves=True),
    "random": Conditions(landing="random", num_sms=4, switches=0.05, staleness=0.5),
    # more multiprocessors than an op with max_sms may use
    "many-sms": Conditions(num_sms=40),
    # the flag is new, what it announces is old
    "fresh-looks": Conditions(num_sms=4, fresh_looks=True),
    # others wait for a rank that stands still, not as long as they may wait, or longer
    "pausing": Conditions(num_sms=4, faults=(Fault(LATE_RANK, 150, PAUSE_SECS),)),
    "stopping": Conditions(num_sms=4, faults=(Fault(LATE_RANK, 150, STOP_SECS),)),
    "stopping-later": Conditions(num_sms=4, faults=(Fault(LATE_RANK, 600, STOP_SECS),)),
}


OP_TEST = Conditions(landing="newest", num_sms=2)
"""For cases that are about values and the order of calls: as "late", with few programs."""


MOST_TOKENS, MOST_UNUSUAL_TOKENS = 4, 9
"""Tokens of an even rank, where a case's own number is larger; an odd one has one less. All branches are kept, and all
eight kinds of unusual rows."""


class SimulationFailed(AssertionError):
    """A run that does not do what the product promises."""


def run(case: str, body: str, conditions: Conditions) -> Outcome:
    """Run a body of a case on all its ranks. The launches of a chain need not wait for each other.

    Raises:
        SimulationFailed: a rank or a kernel has failed.
    """
    given = replace(conditions, dependent=body == "chain", asynchronous=body == "behind_failure", limit_secs=MOST_SECS)
    timed = replace(CASES[case], options={"timeout_secs": TIMEOUT_SECS} | CASES[case].options)
    return run_on_ranks(BODIES[body], timed.world_size, timed, conditions=given)


def run_on_ranks(body: Callable[..., Any], world_size: int, *args: Any, conditions: Conditions = OP_TEST) -> Outcome:
    """Run body(context, *args) on every rank.

    Raises:
        SimulationFailed: a rank or a kernel has failed. The text has its error, and the last operations of each rank.
    """
    simulation = Simulation(world_size, conditions)
    try:
        found = simulation.run(body, *args)
        failed = {f"rank {rank}: ": each for rank, each in enumerate(found.errors) if each}
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises
        failed = {"": error}
    if failed:
        # frees the runs of earlier failures, which their tracebacks keep in cycles; their memory does not count there
        gc.collect()
        errors = [f"{whose}{type(each).__name__}: {each}" for whose, each in failed.items()]
        first = next(iter(failed.values()))
        raise SimulationFailed("\n".join([*errors, describe(simulation)])) from first
    return found


def with_few_tokens(case: Case) -> Case:
    """The case with MOST_TOKENS at most."""
    most = MOST_UNUSUAL_TOKENS if case.unusual else MOST_TOKENS
    tokens = ((min(count, most - rank % 2) for rank, count in enumerate(step)) for step in case.tokens)
    return replace(case, tokens=tuple(map(tuple, tokens)))
