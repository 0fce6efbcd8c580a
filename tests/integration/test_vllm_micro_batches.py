"""Steps that vLLM splits into micro-batches (dual batch overlap), by the schedulers of its releases, on two CPU ranks.

vLLM's threads, its code between them and our ops are real; streams and the graph that captures a step are stubs. The
checks are functions of tests/engines/vllm/contract/micro_batch_checks.py.
"""

import pytest

from tests.engines.vllm.contract.program import MICRO_BATCH_CHECKS
from tests.engines.vllm.contract.reports import TIMEOUT, require_passed
from tests.engines.vllm.contract.wheels import NEWEST

OLDER = ("0.26.0", "0.30.0", "0.32.0")
"""One of each scheduler before the newest: 0.28 and 0.29 split steps by the same files as 0.26, 0.31 as 0.32."""
IN_EVERY_VERSION = (
    "steps_of_two_micro_batches",
    "a_failure_of_our_call_ends_the_step",
    "each_micro_batch_has_the_lengths_of_its_own_requests",
)

pytestmark = TIMEOUT


@pytest.mark.parametrize("check", MICRO_BATCH_CHECKS)
def test_micro_batches(check):
    require_passed(NEWEST, tuple(MICRO_BATCH_CHECKS), check)


@pytest.mark.parametrize("check", IN_EVERY_VERSION)
@pytest.mark.parametrize("version", OLDER)
def test_micro_batches_of_older_versions(version, check):
    require_passed(version, IN_EVERY_VERSION, check)
