"""`python -m tests.engines.vllm.contract.layer_program CHECK...`: layer checks on two ranks."""

from __future__ import annotations

import sys
import traceback

from ep_a2a.testing import RankPool
from tests.engines.vllm.contract.layer_checks import LAYER_CHECKS
from tests.engines.vllm.contract.wheels import report

POOL_TIMEOUT_SECS = 300.0


def main(names: list[str]) -> None:
    with RankPool(2, timeout_secs=POOL_TIMEOUT_SECS) as pool:
        for name in names:
            try:
                pool.run(LAYER_CHECKS[name])
            except Exception:  # noqa: BLE001 - whatever it is, it is the check's outcome
                report(name, traceback.format_exc())
            else:
                report(name, None)


if __name__ == "__main__":
    main(sys.argv[1:])
