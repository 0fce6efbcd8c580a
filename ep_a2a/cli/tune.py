"""`ep-a2a tune`: measures launch numbers on this machine's GPUs and keeps the fastest in tuned tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.commands.tune.search import Outcome
    from ep_a2a.tuning.tables import TunedLaunch

EXIT_MISSING_POINTS = 1


def command(
    ranks: Annotated[int | None, typer.Option(min=2, help="Processes, one per GPU; default: all GPUs.")] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="Sizes (max_num_tokens) to tune; default: 1,4,16,32,...,8192.")
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 7168,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 256,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32.")] = "bfloat16",
    quant: Annotated[str, typer.Option(help="Cast of dispatch: none, fp8_per_token, fp8_per_1x128.")] = "fp8_per_1x128",
    combine_quant: Annotated[str, typer.Option(help="Cast of combine: none, fp8_blockwise, fp8_direct_cast.")] = "none",
    layout: Annotated[str, typer.Option(help="compact, rank_major.")] = "rank_major",
    budget_secs: Annotated[float, typer.Option(min=1, help="Seconds of search for each size.")] = 60.0,
    iterations: Annotated[int, typer.Option(min=1, help="Timed runs of each trial.")] = 20,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder; default: EP_A2A_TUNING_DIR, the checkout's configs/.")
    ] = None,
) -> None:
    """Search for the fastest launch numbers of dispatch and combine, and write tuned tables.

    Each trial is checked, then timed as a round trip in a CUDA graph. Entries of other shapes stay in the tables. The
    exit code is 1 where a size could not be measured. It needs GPUs: times on CPU say nothing about them.
    """
    import torch
    from rich.console import Console

    from ep_a2a.commands.bench.sweep import Sweep
    from ep_a2a.commands.bench.timing import TimingSettings
    from ep_a2a.commands.options import numbers
    from ep_a2a.commands.tune.search import DEFAULT_SIZES, check_can_tune, tune

    world_size = ranks or torch.cuda.device_count()
    check_can_tune(world_size)
    folder = output or default_output()
    points = Sweep(
        gpus_per_node=(0,),
        world_size=(world_size,),
        hidden_dim=(hidden,),
        topk=(topk,),
        num_experts=(experts,),
        dtype=(dtype,),
        quant_type=(quant,),
        combine_quant=(combine_quant,),
        layout=(layout,),
        routing=("uniform",),
        max_sms=(0,),
        max_num_tokens=("same",),
        num_tokens=numbers("max-tokens", max_tokens, DEFAULT_SIZES),
    ).points()
    progress, results, complete = Console(stderr=True), [], True
    for result in tune(points, TimingSettings(num_warmups=5, num_runs=iterations), budget_secs, folder):
        if isinstance(result, str):
            complete = False
            progress.print(result, style="red", markup=False, highlight=False)
            continue
        results.append(result)
        told = f"{result.workload.max_num_tokens}: {result.default_us:.1f} -> {result.best_us:.1f} µs"
        progress.print(told, style="dim", highlight=False)
    show(results)
    typer.echo(f"tables: {folder}")
    raise typer.Exit(0 if complete else EXIT_MISSING_POINTS)


def default_output() -> Path:
    """EP_A2A_TUNING_DIR, else configs/ of the checkout.

    Raises:
        ConfigError: neither is there.
    """
    import ep_a2a
    from ep_a2a import env
    from ep_a2a.errors import ConfigError
    from ep_a2a.tuning.tables import NO_TABLES, shipped_directory

    own = env.TUNING_DIR.get()
    if own and own != NO_TABLES:
        return Path(own)
    shipped = shipped_directory()
    # what is installed belongs to the package manager
    if shipped.parent == Path(ep_a2a.__file__).resolve().parent or not shipped.is_dir():
        raise ConfigError("a folder for the tables", "none", f"Say --output DIR, and set {env.TUNING_DIR.name} to it.")
    return shipped


def show(outcomes: "Sequence[Outcome]") -> None:
    """Prints analytic and best launches and their times."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="round trips, µs")
    for heading in ("max tokens", "phase", "analytic", "best"):
        table.add_column(heading, overflow="fold")
    for heading in ("analytic µs", "best µs", "saved", "trials"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        saved = f"{1 - outcome.best_us / outcome.default_us:.1%}"
        trials = f"{outcome.num_trials}{'' if outcome.is_complete else ', out of time'}"
        times = (f"{outcome.default_us:.1f}", f"{outcome.best_us:.1f}", saved, trials)
        for number, phase in enumerate(outcome.default):
            first = number == 0
            cells = (_text(outcome.default[phase], phase), _text(outcome.best[phase], phase))
            size = str(outcome.workload.max_num_tokens) if first else ""
            table.add_row(size, phase, *cells, *(times if first else ("",) * len(times)))
    Console().print(table)


def _text(launch: "TunedLaunch", phase: str) -> str:
    from ep_a2a.tuning.parse import LAUNCH_FIELDS

    return " ".join(f"{name.removeprefix('num_')} {getattr(launch, name)}" for name in LAUNCH_FIELDS[phase])
