"""Runs checks in the vLLM that this Python imports, in their order, and writes a report of each.

    python -m tests.engines.vllm.contract.program CHECK...

Those of layers run on two ranks, the others in this process.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

from ep_a2a.testing import RankPool
from tests.engines.vllm.contract import config_checks, group_checks, layer_checks, micro_batch_checks, worker_checks
from tests.engines.vllm.contract.checks import use_cpu

POOL_TIMEOUT_SECS = 300.0
REPORT = "report: "
"""Begins a line about a check."""


def checks_of(*modules: ModuleType) -> dict[str, Callable[..., None]]:
    """The functions check_* of modules, in their order, by what follows in their names."""
    return {
        name.removeprefix("check_"): each
        for module in modules
        for name, each in vars(module).items()
        if name.startswith("check_") and each.__module__ == module.__name__
    }


IN_BOTH_FORMS = {name: partial(layer_checks.in_both_forms, case=case) for name, case in layer_checks.FORMS.items()}
PADDED = {
    f"padding_of_{'unpadded' if skips else 'padded'}_tokens_and_{'unpadded' if drops else 'padded'}_rows": partial(
        layer_checks.columns_of_padding, skip_forward_padding=skips, has_unpadded_output=drops
    )
    for skips, drops in product((False, True), repeat=2)
}
LAYER_CHECKS = IN_BOTH_FORMS | PADDED | checks_of(layer_checks)
MICRO_BATCH_CHECKS = checks_of(micro_batch_checks)
# those of a user who has not chosen the backend come first
CHECKS = checks_of(config_checks, worker_checks, group_checks)


def run(call: Callable[[str], Any], names: list[str]) -> None:
    """Calls with each name, and reports what came of it, in the last line of all. Exits with 1 if one failed."""
    failed = []
    for name in names:
        error = None
        try:
            call(name)
        except BaseException:  # noqa: BLE001 - whatever it is, it is the check's outcome
            error = traceback.format_exc()
            failed.append(name)
        sys.stdout.write(f"{REPORT}{json.dumps({'name': name, 'error': error})}\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"{len(names) - len(failed)} of {len(names)} checks passed; failed: {', '.join(failed) or 'none'}\n"
    )
    sys.stdout.flush()
    if failed:
        sys.exit(1)


def main(names: list[str]) -> None:
    on_two_ranks = LAYER_CHECKS | MICRO_BATCH_CHECKS
    if names[0] in on_two_ranks:
        with RankPool(2, timeout_secs=POOL_TIMEOUT_SECS) as pool:
            run(lambda name: pool.run(on_two_ranks[name]), names)
    else:
        use_cpu()
        run(lambda name: CHECKS[name](), names)


if __name__ == "__main__":
    main(sys.argv[1:])
