"""`ep-a2a bench`: checks dispatch and combine, then times them beside baselines and the wire's limit."""

from pathlib import Path
from typing import Annotated

import typer

from ep_a2a.commands.files import check_can_write, different_files
from ep_a2a.commands.options import Device, Quiet, Verbose, distinct, numbers

EXIT_MISSING_ROWS = 1
CONTENDER_NAMES = (
    "wire_limit, ep_a2a, ep_a2a_bounded (max_num_tokens given), ep_a2a_precast (tokens cast before), "
    "ep_low_latency (compat.ep_low_latency, with --layout expert_major), ep_low_latency_traced, ep_a2a_v1, "
    "ep_a2a_v1_ll, ep_a2a_flat, ep_a2a_staged, ep_a2a_nvshmem, ep_a2a_nvshmem_ll (both only when named), nccl_agrs, "
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
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check, then time dispatch, combine and their round trip beside baselines and the wire's limit.

    Options that take several values separate them by commas; every combination is measured. Runs under torchrun too.
    The exit code is 1 where a contender returned a wrong result or raised. Times on CPU say nothing about GPUs.
    """
    from dataclasses import replace

    from ep_a2a.commands.bench.command import DEFAULTS, execute, requested_ranks
    from ep_a2a.commands.bench.contenders import BETWEEN_NODES, check_names, present_names
    from ep_a2a.commands.bench.launcher import make_runner
    from ep_a2a.commands.bench.workload import Sweep
    from ep_a2a.commands.plotting import check_can_plot, dark_variant
    from ep_a2a.commands.ranks import choose_device

    kind, _ = choose_device(device.value, 1)
    defaults = DEFAULTS[kind]
    nodes = numbers("gpus-per-node", gpus_per_node, ())
    usual = defaults.contenders + (BETWEEN_NODES if any(nodes) else ())
    names = usual if contenders is None else present_names(distinct("contenders", contenders))
    check_names(names)
    for path in (json_file, markdown):
        check_can_write(path)
    different_files(json_file, markdown, plot, None if plot is None else dark_variant(plot))
    if plot is not None:
        check_can_plot(plot)
    settings = replace(defaults.timing, num_runs=iterations or defaults.timing.num_runs)
    with make_runner(kind) as runner:
        joined = runner.world_size
        sweep = Sweep(
            world_size=requested_ranks(ranks, kind, joined or defaults.num_ranks, is_joined=joined is not None),
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
