"""`ep-a2a tune`: measures launch numbers on this machine's GPUs and writes the fastest to tuned tables."""

from pathlib import Path
from typing import Annotated

import typer

from ep_a2a.commands.messages import EXIT_MISMATCH
from ep_a2a.commands.options import (
    MOST_EXPERTS,
    MOST_HIDDEN,
    MOST_ITERATIONS,
    MOST_PROCESSES,
    MOST_TOPK,
    AsJson,
    Quiet,
    Seed,
    Verbose,
    at_most,
    given,
    numbers,
)


def command(
    ranks: Annotated[
        int | None, at_most(MOST_PROCESSES, "Processes; more than GPUs share them. Default: one per GPU.")
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="Sizes (max_num_tokens) to tune; default: 1,4,16,32,...,8192.")
    ] = None,
    hidden: Annotated[int, at_most(MOST_HIDDEN, "Hidden size.")] = 7168,
    topk: Annotated[int, at_most(MOST_TOPK, "Experts per token.")] = 8,
    experts: Annotated[int, at_most(MOST_EXPERTS, "Experts over all ranks.")] = 256,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32.")] = "bfloat16",
    quant: Annotated[str, typer.Option(help="Cast of dispatch: none, fp8_per_token, fp8_per_1x128.")] = "fp8_per_1x128",
    combine_quant: Annotated[str, typer.Option(help="Cast of combine: none, fp8_blockwise, fp8_direct_cast.")] = "none",
    layout: Annotated[
        str,
        typer.Option(help="To measure with: compact, rank_major. Entries serve, and replace those of, all layouts."),
    ] = "rank_major",
    budget_secs: Annotated[float, typer.Option(min=1, help="Seconds of search for each size.")] = 60.0,
    iterations: Annotated[int, at_most(MOST_ITERATIONS, "Timed runs of each trial.")] = 20,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder; default: EP_A2A_TUNING_DIR, the checkout's configs/.")
    ] = None,
    as_json: AsJson = False,
    seed: Seed = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Search for the fastest launch numbers of dispatch and combine, and write tuned tables.

    Each trial is checked, then timed as a round trip in a CUDA graph. Entries of other shapes stay in the tables. The
    exit code is 1 where a size could not be measured. It needs GPUs: times on CPU say nothing about them. Where ranks
    share GPUs, it demands --output: such launches are not for ranks with a GPU each.
    """
    import torch

    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Sweep
    from ep_a2a.commands.tune.command import execute
    from ep_a2a.commands.tune.report import default_output
    from ep_a2a.commands.tune.search import DEFAULT_SIZES, check_can_tune
    from ep_a2a.topology.gpu_share import sharing_note

    world_size = ranks or torch.cuda.device_count()
    check_can_tune(world_size)
    note = sharing_note(world_size, torch.cuda.device_count())
    folder = output or default_output(note)
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
        **given({"seed": seed}),
    ).points()
    settings = TimingSettings(num_warmups=5, num_runs=iterations)
    complete = execute(points, settings, budget_secs, folder, as_json=as_json, note=note)
    raise typer.Exit(0 if complete else EXIT_MISMATCH)
