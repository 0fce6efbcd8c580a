"""`ep-a2a demo`: sends real text through an expert-parallel MoE layer and checks it against the dense layer."""

from pathlib import Path
from typing import Annotated

import typer

from ep_a2a.commands.options import Device, Quant, Quiet, Verbose


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
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """Send real text through an expert-parallel MoE layer and compare with the dense layer.

    The exit code is 1 where they differ.
    """
    from ep_a2a.commands.demo.command import execute
    from ep_a2a.commands.demo.model import read_text
    from ep_a2a.commands.demo.settings import DemoSettings, choose_named_backend
    from ep_a2a.commands.ranks import choose_device

    device_kind, num_ranks = choose_device(device.value, ranks)
    settings = DemoSettings(
        num_ranks, device_kind, tokens, hidden, experts, topk, quant.value, gpus_per_node,
        *choose_named_backend(backend),
    )  # fmt: skip
    code = execute(
        settings, read_text(text, tokens), ranks_asked_for=ranks, plot=plot, as_json=as_json, verbose=verbose
    )
    raise typer.Exit(code)
