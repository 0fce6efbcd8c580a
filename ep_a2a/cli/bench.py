"""`ep-a2a bench`: dispatch and combine, checked, then timed beside baselines and the wire's limit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ep_a2a.cli.demo import Device
from ep_a2a.commands.options import check_folder, different_files, distinct, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.commands.bench.launcher import Runner
    from ep_a2a.commands.bench.sweep import Sweep
    from ep_a2a.commands.bench.timing import TimingSettings

EXIT_MISSING_ROWS = 1
CONTENDER_NAMES = (
    "wire_limit, ep_a2a, ep_a2a_bounded (max_num_tokens given), ep_a2a_precast (tokens cast before), "
    "ep_low_latency (compat.ep_low_latency, with --layout expert_major), ep_low_latency_traced, ep_a2a_v1, "
    "ep_a2a_v1_ll, ep_a2a_flat, ep_a2a_rail, ep_a2a_nvshmem, ep_a2a_nvshmem_ll (both only when named), nccl_agrs, "
    "nccl_all_to_all, flashinfer, deepep, deepep_low_latency (V1 beside V2)"
)


def command(
    ranks: Annotated[
        str | None, typer.Option(help="Processes, one per GPU; default: all GPUs, 2 on CPU, torchrun's.")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto takes GPUs where there are any.")] = Device.AUTO,
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
    max_sms: Annotated[str, typer.Option(help="Bounds on multiprocessors (CTAs); 0 = none.")] = "0",
    gpus_per_node: Annotated[str, typer.Option(help="Cut virtual nodes of so many ranks; 0 = one node.")] = "0",
    contenders: Annotated[
        str | None, typer.Option(help=f"Default: all that make sense. Names: {CONTENDER_NAMES}.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Timed runs; default: 50, on CPU 2.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write JSON lines.")] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw round trip over tokens, or bounds (PNG, SVG).")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table as markdown.")] = None,
) -> None:
    """Check, then time dispatch, combine and their round trip beside baselines and the wire's limit.

    Options that take several values separate them by commas; every combination is measured. Runs under torchrun too.
    The exit code is 1 where a contender returned a wrong result or raised. Times on CPU say nothing about GPUs.
    """
    from dataclasses import replace

    from ep_a2a.commands.bench.contenders import BETWEEN_NODES, check_names
    from ep_a2a.commands.bench.launcher import JoinedRunner, make_runner
    from ep_a2a.commands.bench.plot import check_can_plot
    from ep_a2a.commands.bench.sweep import DEFAULTS, Sweep
    from ep_a2a.commands.demo.settings import choose_device

    kind, _ = choose_device(device.value, 1)
    defaults = DEFAULTS[kind]
    nodes = numbers("gpus-per-node", gpus_per_node, ())
    usual = defaults.contenders + (BETWEEN_NODES if any(nodes) else ())
    names = usual if contenders is None else distinct("contenders", contenders)
    check_names(names)
    for path in (json_file, markdown):
        check_folder(path)
    different_files(json_file, markdown, plot)
    if plot is not None:
        check_can_plot(plot)
    settings = replace(defaults.timing, num_runs=iterations or defaults.timing.num_runs)
    with make_runner(kind) as runner:
        joined = runner.world_size if isinstance(runner, JoinedRunner) else None
        sweep = Sweep(
            world_size=_ranks(ranks, kind, joined or defaults.num_ranks, is_joined=joined is not None),
            hidden_dim=numbers("hidden", hidden, (defaults.hidden_dim,)),
            topk=numbers("topk", topk, (defaults.topk,)),
            num_experts=numbers("experts", experts, (defaults.num_experts,)),
            dtype=distinct("dtype", dtype),
            quant_type=distinct("quant", quant or defaults.quant_type),
            combine_quant=distinct("combine-quant", combine_quant),
            layout=distinct("layout", layout),
            routing=distinct("routing", routing),
            max_num_tokens=distinct("max-tokens", max_tokens),
            num_tokens=numbers("tokens", tokens, defaults.num_tokens),
            max_sms=numbers("max-sms", max_sms, ()),
            gpus_per_node=nodes,
        )
        complete = execute(runner, sweep, names, settings, kind, json_file=json_file, plot=plot, markdown=markdown)
    raise typer.Exit(0 if complete else EXIT_MISSING_ROWS)


def execute(
    runner: "Runner",
    sweep: "Sweep",
    names: "Sequence[str]",
    settings: "TimingSettings",
    device: str,
    *,
    json_file: Path | None = None,
    plot: Path | None = None,
    markdown: Path | None = None,
) -> bool:
    """Runs the sweep and reports it, on the rank that shows results.

    Returns:
        Whether every contender that is available here was right and did not raise.
    """
    from rich.console import Console

    from ep_a2a.commands.bench.environment import describe
    from ep_a2a.commands.bench.launcher import run_sweep
    from ep_a2a.commands.bench.plot import plot_round_trips
    from ep_a2a.commands.bench.report import JsonLines, show, write_markdown
    from ep_a2a.commands.bench.rows import Status, make_records

    points = sweep.points()
    header = describe(device) if runner.shows_results else {}
    console = Console(quiet=not runner.shows_results)
    progress = Console(stderr=True, quiet=not runner.shows_results)
    if "note" in header:
        console.print(header["note"], style="bold yellow", highlight=False)
    lines = JsonLines(json_file, header) if json_file is not None and runner.shows_results else None
    records: list[dict[str, Any]] = []

    def on_row(row: Any) -> None:
        took = f"{row.timing.round_trip.p50_us:.1f} µs" if row.timing is not None else row.status.value
        bound = f" max SMs={row.workload.max_sms}" if row.workload.max_sms else ""
        progress.print(f"T={row.workload.num_tokens}{bound} {row.contender}: {took}", style="dim", highlight=False)

    for rows in run_sweep(points, names, settings, runner, on_row):
        records += make_records(rows)
        if lines is not None:
            lines.append(records[-len(rows) :])
    if runner.shows_results:
        show(console, header, records)
        if markdown is not None:
            write_markdown(markdown, header, records)
        if plot is not None:
            if not any(record["status"] == Status.OK for record in records):
                console.print("nothing was measured: the picture is empty", style="bold yellow", highlight=False)
            plot_round_trips(records, plot, header.get("note", ""))
        for path in filter(None, (json_file, plot, markdown)):
            console.print(f"written: {path}", markup=False, highlight=False)
    return all(record["status"] in (Status.OK, Status.UNAVAILABLE) for record in records)


def _ranks(text: str | None, device: str, default: int | None, *, is_joined: bool) -> tuple[int, ...]:
    import torch

    from ep_a2a.errors import ConfigError, UnsupportedError

    num_gpus = torch.cuda.device_count()
    asked = numbers("ranks", text, (default or num_gpus,))
    if is_joined and asked != (default,):
        raise ConfigError(f"--ranks {default}, which torchrun has started", str(text), "Leave --ranks out.")
    if not is_joined and device == "cuda" and max(asked) > num_gpus:
        raise UnsupportedError(f"at most {num_gpus} ranks, one for each GPU", str(max(asked)), "Lower --ranks.")
    return asked
