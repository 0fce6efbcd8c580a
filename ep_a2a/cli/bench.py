"""`ep-a2a bench`: checks dispatch and combine, then times them beside baselines and the wire's limit."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ep_a2a.cli.command import Command as BaseCommand
from ep_a2a.commands.messages import EXIT_MISMATCH, warn
from ep_a2a.commands.options import (
    MOST_ITERATIONS,
    AsJson,
    Device,
    DeviceOption,
    Quiet,
    Seed,
    Verbose,
    at_most,
)

CONTENDER_NAMES = (
    "wire_limit, ep_a2a, ep_a2a_bounded (max_num_tokens given), ep_a2a_precast (tokens cast before), "
    "ep_low_latency (compat.ep_low_latency, with --layout expert_major), ep_low_latency_traced, ep_a2a_v1, "
    "ep_a2a_v1_ll, ep_a2a_flat, ep_a2a_staged, ep_a2a_nvshmem, ep_a2a_nvshmem_ll (both only when named), nccl_agrs, "
    "nccl_all_to_all, flashinfer, deepep, deepep_low_latency (V1 beside V2)"
)


class Command(BaseCommand):
    """The command, with `--json FILE` of version 0.2 as another name of `--output FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments."""
        return super().parse_args(ctx, without_json_file(args))


def without_json_file(arguments: list[str]) -> list[str]:
    """Returns the arguments with `--output FILE` for `--json FILE`, and says so on stderr."""
    changed: list[str] = []
    for number, argument in enumerate(arguments):
        following = arguments[number + 1 : number + 2]
        has_file = argument == "--json" and following and not following[0].startswith("-")
        changed.append("--output" if has_file else argument.replace("--json=", "--output=", 1))
    if changed != arguments:
        warn("bench --json FILE is deprecated: say --output FILE. --json alone prints to standard output.")
    return changed


def command(
    ranks: Annotated[
        str | None,
        typer.Option(help="Processes; more than GPUs share them. Default: one per GPU, 2 on CPU, torchrun's."),
    ] = None,
    device: DeviceOption = Device.AUTO,
    tokens: Annotated[str | None, typer.Option(help="Tokens per rank; default: 1,16,32,128,512,4096 on GPUs.")] = None,
    max_tokens: Annotated[str, typer.Option(help="What buffers are made for: numbers, or same (as tokens).")] = "same",
    hidden: Annotated[str | None, typer.Option(help="Hidden sizes; default: 7168 on GPUs.")] = None,
    topk: Annotated[str | None, typer.Option(help="Experts per token; default: 8 on GPUs.")] = None,
    experts: Annotated[str | None, typer.Option(help="Experts over all ranks; default: 256 on GPUs.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32.")] = "bfloat16",
    quant: Annotated[
        str | None, typer.Option(help="Cast of dispatch: none, fp8_per_token, fp8_per_1x128 (default).")
    ] = None,
    combine_quant: Annotated[str, typer.Option(help="Cast of combine: none, fp8_blockwise, fp8_direct_cast.")] = "none",
    layout: Annotated[str, typer.Option(help="compact, rank_major, expert_major.")] = "compact",
    routing: Annotated[str, typer.Option(help="uniform, zipf, all_to_one, ...: names in ep_a2a.routing.")] = "uniform",
    max_sms: Annotated[
        str, typer.Option(help="Bounds on each rank's multiprocessors (CTAs), such as 8,16; 0 = none, or its share.")
    ] = "0",
    shared_gpu: Annotated[
        bool, typer.Option("--shared-gpu", help="Put all ranks on the first GPU; 2 ranks unless --ranks says more.")
    ] = False,
    cold_cache: Annotated[
        bool, typer.Option("--cold-cache", help="Time round trips behind a flushed L2, too; always where ranks share.")
    ] = False,
    gpus_per_node: Annotated[str, typer.Option(help="Cut virtual nodes of so many ranks; 0 = one node.")] = "0",
    contenders: Annotated[
        str | None, typer.Option(help=f"Default: all that make sense. Names: {CONTENDER_NAMES}.")
    ] = None,
    iterations: Annotated[int | None, at_most(MOST_ITERATIONS, "Timed runs; default: 50, on CPU 2.")] = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option(help="Write JSON lines, a header and a line per row.")] = None,
    seed: Seed = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw round trip over tokens, or bounds (PNG, SVG).")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table as markdown.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check, then time dispatch, combine and their round trip beside baselines and the wire's limit.

    Options that take several values separate them by commas; every combination is measured. Runs under torchrun too.
    The exit code is 1 where a contender returned a wrong result or raised. Times on CPU say nothing about GPUs.
    """
    options = dict(locals())
    from ep_a2a.commands.bench.command import run

    raise typer.Exit(0 if run(options) else EXIT_MISMATCH)
