"""`ep-a2a trace`: spans inside the kernels of dispatch and combine, as traces for Perfetto and as a picture."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ep_a2a.cli.demo import Device, Quant

if TYPE_CHECKING:
    from rich.console import Console

    from ep_a2a.commands.bench.workload import Workload
    from ep_a2a.telemetry.spans import TraceSpan

SIZES = {
    "cpu": {"ranks": 2, "tokens": 4, "hidden": 256, "experts": 8, "topk": 2},
    "cuda": {"ranks": 8, "tokens": 128, "hidden": 7168, "experts": 256, "topk": 8},
}
"""Where no option says otherwise; on GPUs at most as many ranks as there are."""
RUN_TIMEOUT_SECS = 600.0
WRITTEN = re.compile(r"trace(_RANK_\d+)?\.json|timeline\.png")
"""Names of the files that the command writes."""


def command(
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes; default: all GPUs, 2 on CPU.")] = None,
    device: Annotated[Device, typer.Option(help="auto takes GPUs where there are any.")] = Device.AUTO,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per rank; default: 128, on CPU 4.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size; default: 7168, on CPU 256.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts over all ranks; default: 256, on CPU 8.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts per token; default: 8, on CPU 2.")] = None,
    quant: Annotated[Quant, typer.Option(help="Cast inside dispatch.")] = Quant.FP8_PER_1X128,
    layout: Annotated[str, typer.Option(help="compact, rank_major, expert_major.")] = "expert_major",
    steps: Annotated[int, typer.Option(min=1, help="Steps; the latest 32 are in the trace.")] = 4,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder to write into; made if need be.")] = Path(
        "prof"
    ),
    plot: Annotated[bool, typer.Option(help="Draw the last step (needs matplotlib).")] = True,
) -> None:
    """Run dispatch and combine with kernels that note what they do, and write traces.

    Writes trace_RANK_<rank>.json for each rank and trace.json with all of them, which Perfetto opens, and timeline.png.
    Files of these names that an earlier run has left in the folder are removed.
    Kernels that note times are other ones than those that serve, and slower: use `bench` for times.
    """
    from ep_a2a.commands.bench.plot import check_can_plot
    from ep_a2a.commands.bench.workload import Workload
    from ep_a2a.commands.demo.settings import choose_device
    from ep_a2a.config import Layout, parse_enum
    from ep_a2a.errors import TopKError

    kind, _ = choose_device(device.value, 1)
    sizes = SIZES[kind]
    _, num_ranks = choose_device(device.value, ranks or sizes["ranks"])
    num_tokens = tokens or sizes["tokens"]
    parse_enum(Layout, layout, "--layout")
    workload = Workload(
        num_ranks, num_tokens, num_tokens, hidden or sizes["hidden"], topk or sizes["topk"],
        experts or sizes["experts"], quant_type=quant.value, layout=layout,
    )  # fmt: skip
    if workload.topk > workload.num_experts:
        raise TopKError(f"--topk of at most {workload.num_experts}, the experts", str(workload.topk), "Lower --topk.")
    output.mkdir(parents=True, exist_ok=True)
    if plot:
        check_can_plot(output / "timeline.png")
    execute(workload, kind, steps, output, plot=plot)


def execute(workload: "Workload", device: str, num_steps: int, folder: Path, *, plot: bool) -> None:
    """Runs the steps on all ranks, writes the traces and prints what is in them."""
    from rich.console import Console

    from ep_a2a.commands.bench.native import make_config
    from ep_a2a.commands.demo.launcher import call_ranks, stdout_to_stderr
    from ep_a2a.commands.demo.worker import join
    from ep_a2a.commands.trace.steps import trace_steps
    from ep_a2a.commands.trace.timeline import last_step, plot_timeline
    from ep_a2a.telemetry.trace import write_trace
    from ep_a2a.testing.launch import RankPool

    make_config(workload, 0)
    with RankPool(workload.world_size, device=device, timeout_secs=RUN_TIMEOUT_SECS) as pool:
        with stdout_to_stderr():
            call_ranks(pool, join)
        spans = dict(enumerate(call_ranks(pool, trace_steps, workload, num_steps)))
    removed = remove_earlier(folder)
    for rank, own in spans.items():
        write_trace({rank: own}, folder / f"trace_RANK_{rank}.json")
    write_trace(spans, folder / "trace.json")
    if plot:
        note = f"{workload.num_tokens} tokens per rank, {workload.quant_type}, {workload.layout}, {device}"
        plot_timeline(last_step(spans), folder / "timeline.png", note)
    console = Console()
    _show(console, spans, device)
    written = "trace_RANK_*.json, trace.json" + (", timeline.png" if plot else "")
    console.print(f"{folder}: {written}", markup=False, soft_wrap=True)
    if left_over := [name for name in removed if not (folder / name).exists()]:
        console.print(f"removed there, of an earlier run: {', '.join(left_over)}", markup=False, soft_wrap=True)


def remove_earlier(folder: Path) -> list[str]:
    """Removes what this command has written into the folder before, nothing else; the names, sorted."""
    earlier = sorted(each.name for each in folder.iterdir() if WRITTEN.fullmatch(each.name) and not each.is_dir())
    for name in earlier:
        (folder / name).unlink()
    return earlier


def _show(console: "Console", spans: "dict[int, list[TraceSpan]]", device: str) -> None:
    """A row per name: how often it was recorded, and its median and longest time."""
    import statistics

    from rich.table import Table

    from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES

    table = Table("span", "recorded", "median µs", "longest µs", title=f"{len(spans)} ranks on {device}")
    for name in (*DISPATCH_NAMES, *COMBINE_NAMES, "dispatch", "combine"):
        times = [(each.end_ns - each.start_ns) / 1000 for own in spans.values() for each in own if each.name == name]
        if times:
            title = f"{name} (call on the host)" if name in ("dispatch", "combine") else name
            table.add_row(title, str(len(times)), f"{statistics.median(times):.1f}", f"{max(times):.1f}")
    console.print(table)
