"""`python -m tests.engines.vllm.contract.program CHECK...`: runs checks in this order."""

from __future__ import annotations

import sys

from tests.engines.vllm.contract.checks import run
from tests.engines.vllm.contract.config_checks import UNPICKLE, WITH_CHOICE, WITHOUT_CHOICE, unpickle
from tests.engines.vllm.contract.engine_checks import ENGINE_CHECKS, UNPICKLE_ENGINE, unpickle_engine
from tests.engines.vllm.contract.group_checks import GROUP_CHECKS
from tests.engines.vllm.contract.worker_checks import WORKER_CHECKS

CHOSEN = {**WITH_CHOICE, **WORKER_CHECKS, **GROUP_CHECKS, **ENGINE_CHECKS}
CHECKS = {**WITHOUT_CHOICE, **CHOSEN}

if __name__ == "__main__":
    if sys.argv[1] == UNPICKLE:
        unpickle(sys.argv[2])
    elif sys.argv[1] == UNPICKLE_ENGINE:
        unpickle_engine(sys.argv[2])
    else:
        run(CHECKS, sys.argv[1:])
