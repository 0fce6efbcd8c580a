"""`ep-a2a trace`: records spans inside the kernels of dispatch and combine, for Perfetto and as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ep_a2a.commands import options as opt

if TYPE_CHECKING:
    from types import SimpleNamespace

SIZES = {
    "cpu": {"ranks": 2, "tokens": 4, "hidden": 256, "experts": 8, "topk": 2},
    "cuda": {"ranks": 8, "tokens": 128, "hidden": 7168, "experts": 256, "topk": 8},
}
"""Defaults of options by device; of several GPUs each gets one rank at most."""
A_FOLDER = {"file_okay": False}

OPTIONS = (
    opt.number("ranks", "Processes; default: all GPUs, 8 on one, 2 on CPU.", opt.MOST_PROCESSES),
    opt.DEVICE,
    opt.number("tokens", "Tokens per rank; default: 128, on CPU 4.", opt.MOST_TOKENS),
    opt.number("hidden", "Hidden size; default: 7168, on CPU 256.", opt.MOST_HIDDEN),
    opt.number("experts", "Experts over all ranks; default: 256, on CPU 8.", opt.MOST_EXPERTS),
    opt.number("topk", "Experts per token; default: 8, on CPU 2.", opt.MOST_TOPK),
    dataclasses.replace(opt.QUANT, default=opt.Quant.FP8_PER_1X128),
    opt.Option("layout", str, "compact, rank_major, expert_major.", "expert_major"),
    opt.number("steps", "Steps; the latest 32 are in the trace.", opt.MOST_ITERATIONS, 4),
    opt.Option("output", Path, "Folder to write into; made if need be.", Path("prof"), limits=A_FOLDER),
    opt.Option("plot", bool, "Draw the last step (needs matplotlib).", True),
    opt.AS_JSON,
    opt.SEED,
)


def run(options: SimpleNamespace) -> None:
    """Run dispatch and combine with kernels that note what they do, and write traces.

    Writes trace_RANK_<rank>.json for each rank and trace.json with all of them, which Perfetto opens, and
    timeline.png with timeline.dark.png for dark pages.
    Files of these names that an earlier run has left in the folder are removed.
    Kernels that note times are other ones than those that serve, and slower: use `bench` for times.
    """
    from ep_a2a.commands.files import check_folder
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.commands.options import check_topk
    from ep_a2a.commands.plots import check_can_plot
    from ep_a2a.commands.ranks import choose_device, default_ranks
    from ep_a2a.commands.trace import execute
    from ep_a2a.config import Layout, parse_enum

    kind = choose_device(options.device.value)
    sizes = SIZES[kind] | opt.given({name: getattr(options, name) for name in SIZES[kind]})
    parse_enum(Layout, options.layout, "layout")
    check_topk(sizes["topk"], sizes["experts"])
    workload = Workload(
        options.ranks or default_ranks(kind, sizes["ranks"]),
        sizes["tokens"],
        sizes["tokens"],
        sizes["hidden"],
        sizes["topk"],
        sizes["experts"],
        quant_type=options.quant.value,
        layout=options.layout,
        **opt.given({"seed": options.seed}),
    )
    check_folder(options.output)
    if options.plot:
        check_can_plot(options.output / "timeline.png")
    execute(workload, kind, options.steps, options.output, plot=options.plot, as_json=options.as_json)
