"""`ep-a2a demo`: real text through an expert-parallel MoE layer, checked against the dense layer."""

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ep_a2a.commands.demo.model import DemoText
    from ep_a2a.commands.demo.report import DemoReport
    from ep_a2a.commands.demo.settings import DemoSettings

EXIT_MISMATCH = 1


class Device(enum.StrEnum):
    """Values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Quant(enum.StrEnum):
    """Values of --quant: the casts that act inside dispatch."""

    NONE = "none"
    FP8_PER_TOKEN = "fp8_per_token"
    FP8_PER_1X128 = "fp8_per_1x128"


def command(
    ranks: Annotated[int, typer.Option(min=1, help="Processes; on GPUs at most one per GPU.")] = 4,
    device: Annotated[Device, typer.Option(help="auto takes GPUs where there are any.")] = Device.AUTO,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to send; default: the project's README.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens (words and marks) over all ranks.")] = 96,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size; rows must be a multiple of 16 bytes.")] = 256,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 16,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 4,
    quant: Annotated[Quant, typer.Option(help="Cast inside dispatch.")] = Quant.NONE,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per virtual node; default: as the machine is.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="ep_a2a, naive or allgather_reducescatter; default: EP_A2A_CONFIG's file, "
                                      "EP_A2A_BACKEND, ep_a2a.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the traffic as a heat map (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:  # fmt: skip
    """Send real text through an expert-parallel MoE layer and compare with the dense layer.

    The exit code is 1 where they differ.
    """
    from ep_a2a.commands.demo.model import read_text
    from ep_a2a.commands.demo.settings import DemoSettings, choose_device, choose_named_backend

    device_kind, num_ranks = choose_device(device.value, ranks)
    settings = DemoSettings(
        num_ranks, device_kind, tokens, hidden, experts, topk, quant.value, gpus_per_node,
        *choose_named_backend(backend),
    )  # fmt: skip
    raise typer.Exit(execute(settings, read_text(text, tokens), ranks_asked_for=ranks, plot=plot, as_json=as_json))


def execute(
    settings: "DemoSettings",
    text: "DemoText",
    *,
    ranks_asked_for: int,
    plot: Path | None = None,
    as_json: bool = False,
    corrupt_rank: int | None = None,
) -> int:
    """Runs the demo and prints its report.

    Args:
        settings: sizes and choices. text: settings.num_tokens tokens.
        ranks_asked_for: what the user wanted; settings.num_ranks is what the machine can do.
        plot: where to write the heat map.
        as_json: print the report as JSON.
        corrupt_rank: for tests: the rank that shall return a wrong row.

    Returns:
        The exit code.
    """
    import json

    from rich.console import Console

    from ep_a2a.commands.demo.view import show_report
    from ep_a2a.commands.plotting import check_can_plot, plot_traffic

    if plot is not None:
        check_can_plot(plot)
    settings.check()
    report = _run(settings, text, ranks_asked_for, corrupt_rank, show_progress=not as_json)
    if plot is not None:
        plot_traffic(report.rows, f"{report.backend}, {sum(report.tokens_per_rank)} tokens, top-{report.topk}", plot)
    if as_json:
        typer.echo(json.dumps(report.as_json_object(), indent=2))
    else:
        console = Console()
        show_report(console, report)
        if plot is not None:
            console.print(f"heat map: {plot}", markup=False)
    return 0 if report.matches else EXIT_MISMATCH


def _run(
    settings: "DemoSettings", text: "DemoText", ranks_asked_for: int, corrupt_rank: int | None, *, show_progress: bool
) -> "DemoReport":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ep_a2a.commands.demo.launcher import NUM_PHASES, run_demo_ranks
    from ep_a2a.commands.demo.report import make_report

    # On stderr, whose ends the ranks share; shown only to somebody who watches both.
    console = Console(stderr=True)
    visible = show_progress and console.is_interactive and sys.stdout.isatty()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        # One more than the ranks' phases: the comparison.
        bar = progress.add_task("", total=NUM_PHASES + 1)

        def on_phase(description: str) -> None:
            task = progress.tasks[bar]
            progress.update(bar, description=description, completed=task.completed + bool(task.description))

        results, seconds = run_demo_ranks(settings, text.tokens, on_phase, corrupt_rank)
        on_phase("comparing with the dense layer")
        return make_report(settings, text, ranks_asked_for, results, seconds)
