"""`ep-a2a demo`: sends real text through an expert-parallel MoE layer and checks it against the dense layer."""

from pathlib import Path
from typing import Annotated

import typer

from ep_a2a.commands.options import (
    MOST_EXPERTS,
    MOST_HIDDEN,
    MOST_PROCESSES,
    MOST_TOKENS,
    MOST_TOPK,
    AsJson,
    Device,
    DeviceOption,
    OutputFile,
    Quant,
    QuantOption,
    Quiet,
    Seed,
    Verbose,
    at_most,
    given,
)

DEFAULT_RANKS = 4


def command(
    ranks: Annotated[
        int | None, at_most(MOST_PROCESSES, "Processes; more than GPUs share them. Default: 4, on 2 or 3 GPUs as many.")
    ] = None,
    device: DeviceOption = Device.AUTO,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to send; default: the project's README.")
    ] = None,
    tokens: Annotated[int, at_most(MOST_TOKENS, "Tokens (words and marks) over all ranks.")] = 96,
    hidden: Annotated[int, at_most(MOST_HIDDEN, "Hidden size; rows must be a multiple of 16 bytes.")] = 256,
    experts: Annotated[int, at_most(MOST_EXPERTS, "Experts over all ranks.")] = 16,
    topk: Annotated[int, at_most(MOST_TOPK, "Experts per token.")] = 4,
    quant: QuantOption = Quant.NONE,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per virtual node; default: as the machine is.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="ep_a2a, naive or allgather_reducescatter; default: EP_A2A_CONFIG's file, EP_A2A_BACKEND, ep_a2a."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the traffic as a heat map (PNG).")] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
    seed: Seed = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Send real text through an expert-parallel MoE layer and compare with the dense layer.

    The exit code is 1 where they differ.
    """
    from ep_a2a.commands.demo.command import execute
    from ep_a2a.commands.demo.model import read_text
    from ep_a2a.commands.demo.settings import DemoSettings, choose_named_backend
    from ep_a2a.commands.files import check_can_write, different_files
    from ep_a2a.commands.ranks import choose_device, default_ranks

    check_can_write(output)
    different_files(output, plot)
    kind = choose_device(device.value)
    settings = DemoSettings(
        ranks or default_ranks(kind, DEFAULT_RANKS),
        kind,
        tokens,
        hidden,
        experts,
        topk,
        quant.value,
        gpus_per_node,
        *choose_named_backend(backend),
        **given({"seed": seed}),
    )
    code = execute(settings, read_text(text, tokens), plot=plot, output=output, as_json=as_json, verbose=verbose)
    raise typer.Exit(code)
