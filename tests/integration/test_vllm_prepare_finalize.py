"""MoE layers of a real vLLM on two CPU ranks, with our prepare/finalize, against the dense layer in float32.

The checks are functions of tests/engines/vllm/contract/layer_checks.py. One process with a pool of ranks runs them all;
each test asks what became of one check.
"""

import pytest

from tests.engines.vllm.contract.program import LAYER_CHECKS
from tests.engines.vllm.contract.reports import TIMEOUT, require_passed
from tests.engines.vllm.contract.wheels import NEWEST, VERSIONS

IN_EVERY_VERSION = "fp8_per_block"

pytestmark = TIMEOUT


@pytest.mark.parametrize("check", LAYER_CHECKS)
def test_layers(check):
    require_passed(NEWEST, tuple(LAYER_CHECKS), check)


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_a_layer_of_older_versions(version):
    require_passed(version, (IN_EVERY_VERSION,), IN_EVERY_VERSION)
