"""`ep-a2a trace`: records spans inside the kernels of dispatch and combine, for Perfetto and as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from ep_a2a.commands.options import (
    MOST_EXPERTS,
    MOST_HIDDEN,
    MOST_ITERATIONS,
    MOST_PROCESSES,
    MOST_TOKENS,
    MOST_TOPK,
    AsJson,
    Device,
    DeviceOption,
    Quant,
    QuantOption,
    Quiet,
    Seed,
    Verbose,
    at_most,
    given,
)

SIZES = {
    "cpu": {"ranks": 2, "tokens": 4, "hidden": 256, "experts": 8, "topk": 2},
    "cuda": {"ranks": 8, "tokens": 128, "hidden": 7168, "experts": 256, "topk": 8},
}
"""Defaults of options by device; of several GPUs each gets one rank at most."""


def command(
    ranks: Annotated[int | None, at_most(MOST_PROCESSES, "Processes; default: all GPUs, 8 on one, 2 on CPU.")] = None,
    device: DeviceOption = Device.AUTO,
    tokens: Annotated[int | None, at_most(MOST_TOKENS, "Tokens per rank; default: 128, on CPU 4.")] = None,
    hidden: Annotated[int | None, at_most(MOST_HIDDEN, "Hidden size; default: 7168, on CPU 256.")] = None,
    experts: Annotated[int | None, at_most(MOST_EXPERTS, "Experts over all ranks; default: 256, on CPU 8.")] = None,
    topk: Annotated[int | None, at_most(MOST_TOPK, "Experts per token; default: 8, on CPU 2.")] = None,
    quant: QuantOption = Quant.FP8_PER_1X128,
    layout: Annotated[str, typer.Option(help="compact, rank_major, expert_major.")] = "expert_major",
    steps: Annotated[int, at_most(MOST_ITERATIONS, "Steps; the latest 32 are in the trace.")] = 4,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder to write into; made if need be.")] = Path(
        "prof"
    ),
    plot: Annotated[bool, typer.Option(help="Draw the last step (needs matplotlib).")] = True,
    as_json: AsJson = False,
    seed: Seed = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run dispatch and combine with kernels that note what they do, and write traces.

    Writes trace_RANK_<rank>.json for each rank and trace.json with all of them, which Perfetto opens, and
    timeline.png with timeline.dark.png for dark pages.
    Files of these names that an earlier run has left in the folder are removed.
    Kernels that note times are other ones than those that serve, and slower: use `bench` for times.
    """
    from ep_a2a.commands.files import check_folder
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.commands.plotting import check_can_plot
    from ep_a2a.commands.ranks import choose_device, default_ranks
    from ep_a2a.commands.trace.command import execute
    from ep_a2a.config import Layout, parse_enum
    from ep_a2a.errors import TopKError

    kind = choose_device(device.value)
    sizes = SIZES[kind]
    num_ranks = ranks or default_ranks(kind, sizes["ranks"])
    num_tokens = tokens or sizes["tokens"]
    parse_enum(Layout, layout, "--layout")
    workload = Workload(
        num_ranks,
        num_tokens,
        num_tokens,
        hidden or sizes["hidden"],
        topk or sizes["topk"],
        experts or sizes["experts"],
        quant_type=quant.value,
        layout=layout,
        **given({"seed": seed}),
    )
    if workload.topk > workload.num_experts:
        raise TopKError(f"--topk of at most {workload.num_experts}, the experts", str(workload.topk), "Lower --topk.")
    check_folder(output)
    if plot:
        check_can_plot(output / "timeline.png")
    execute(workload, kind, steps, output, plot=plot, as_json=as_json)
