"""`python -m tests.vllm_contract.program CHECK...`: runs checks in the vLLM that this Python imports, in this order."""

from __future__ import annotations

import sys

from tests.vllm_contract.checks import run
from tests.vllm_contract.config_checks import UNPICKLE, WITH_CHOICE, WITHOUT_CHOICE, unpickle
from tests.vllm_contract.engine_checks import ENGINE_CHECKS, UNPICKLE_ENGINE, unpickle_engine
from tests.vllm_contract.group_checks import GROUP_CHECKS
from tests.vllm_contract.worker_checks import WORKER_CHECKS

CHOSEN = {**WITH_CHOICE, **WORKER_CHECKS, **GROUP_CHECKS, **ENGINE_CHECKS}
CHECKS = {**WITHOUT_CHOICE, **CHOSEN}

if __name__ == "__main__":
    if sys.argv[1] == UNPICKLE:
        unpickle(sys.argv[2])
    elif sys.argv[1] == UNPICKLE_ENGINE:
        unpickle_engine(sys.argv[2])
    else:
        run(CHECKS, sys.argv[1:])
