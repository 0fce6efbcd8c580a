"""The kernels on weak memory: every step meets the oracle, however late stores land and however old loads are."""

from dataclasses import replace

import pytest

from tests.simulator.cases import CASES, bodies_of
from tests.simulator.runs import CONDITIONS, run
from tests.simulator.seeds import TIMES, seeds
from tests.simulator.test_sites import NOTICED_BY

RUNS = [(case, body) for case in CASES for body in bodies_of(case)]
# each kernel that may begin before the launch ahead of it has ended
CHAINS = ("low_latency_compact", "bulk_compact", "switching", "expert_major", "rings")
QUICK = {
    *((case, body, "late") for case, body in RUNS if body != "chain" or case in CHAINS),
    # without a fault of their own
    *NOTICED_BY.values(),
    ("bulk_compact", "until_late", "stopping"),
    ("low_latency_sparse", "until_late", "stopping"),
    ("bounded", "steps", "many-sms"),
    ("bounded_fp8_results", "steps", "many-sms"),
    ("bounded_marks", "steps", "many-sms"),
    ("bounded_marks_six", "steps", "many-sms"),
    ("bounded_fp8_marks", "steps", "many-sms"),
    ("bounded_fp8_direct", "steps", "many-sms"),
    ("bounded_compact_cast", "steps", "many-sms"),
    ("bounded_look_back", "steps", "many-sms"),
    ("low_latency", "steps", "halves"),
    ("low_latency", "steps", "random-halves"),
    ("low_latency_cast", "steps", "halves"),
    ("bounded_fp8_marks", "steps", "halves"),
}
# the last two notice mutants of tools/mutants.toml
REST = {(*each, "late") for each in RUNS} - QUICK | {(case, "chain", "random") for case in CHAINS[:2]}
BY_CHANCE = RUNS if TIMES > 1 else [(case, bodies_of(case)[-1]) for case in CASES]
"""One body of each case in CI, all in `make seeds`."""


@pytest.mark.parametrize(
    ("case", "body", "name"), [*sorted(QUICK), *(pytest.param(*each, marks=pytest.mark.full) for each in sorted(REST))]
)
def test_steps_meet_the_oracle(case, body, name):
    run(case, body, CONDITIONS[name])


@pytest.mark.full
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(("case", "body"), BY_CHANCE)
def test_steps_meet_the_oracle_by_chance(case, body, seed):
    run(case, body, replace(CONDITIONS["random"], seed=seed))
