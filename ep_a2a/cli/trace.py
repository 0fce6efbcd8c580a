"""`ep-a2a trace`: records spans inside the kernels of dispatch and combine, for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer

from ep_a2a.cli import options as opt
from ep_a2a.commands.options import Device, Quant, given

SIZES = {
    "cpu": {"ranks": 2, "tokens": 4, "hidden": 256, "experts": 8, "topk": 2},
    "cuda": {"ranks": 8, "tokens": 128, "hidden": 7168, "experts": 256, "topk": 8},
}
"""Defaults of options by device; of several GPUs each gets one rank at most."""
RANKS = "Processes; default: all GPUs, 8 on one, 2 on CPU."


def trace(
    ranks: Annotated[int | None, opt.number(RANKS, opt.MOST_PROCESSES)] = None,
    device: opt.OnDevice = Device.AUTO,
    tokens: Annotated[int | None, opt.number("Tokens per rank; default: 128, on CPU 4.", opt.MOST_TOKENS)] = None,
    hidden: Annotated[int | None, opt.number("Hidden size; default: 7168, on CPU 256.", opt.MOST_HIDDEN)] = None,
    experts: Annotated[
        int | None, opt.number("Experts over all ranks; default: 256, on CPU 8.", opt.MOST_EXPERTS)
    ] = None,
    topk: Annotated[int | None, opt.number("Experts per token; default: 8, on CPU 2.", opt.MOST_TOPK)] = None,
    quant: opt.Cast = Quant.FP8_PER_1X128,
    layout: Annotated[str, typer.Option(help="compact, rank_major, expert_major.")] = "expert_major",
    steps: Annotated[int, opt.number("Steps; the latest 32 are in the trace.", opt.MOST_ITERATIONS)] = 4,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json"),
    as_json: opt.AsJson = False,
    seed: opt.Seed = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Run kernels that note what they do, and write a trace.

    Perfetto opens the file, which has a process for each rank.
    Kernels that note times are other ones than those that serve, and slower: use `bench` for times.
    """
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.commands.ranks import choose_device, default_ranks
    from ep_a2a.commands.trace import execute

    kind = choose_device(device)
    typed = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk, "seed": seed}
    sizes = SIZES[kind] | {"ranks": default_ranks(kind, SIZES[kind]["ranks"])} | given(typed)
    workload = Workload(**sizes, quant=quant.value, layout=layout)
    execute(workload, kind, steps, output, as_json=as_json)
