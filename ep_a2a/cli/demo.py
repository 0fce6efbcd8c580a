"""`ep-a2a demo`: sends a text through an expert-parallel MoE layer and checks it against the dense layer."""

from types import SimpleNamespace
from typing import Annotated

import typer

from ep_a2a.cli import options as opt
from ep_a2a.commands.options import Device, Quant, given, named_backend

DEFAULT_RANKS = 4
RANKS = "Processes; more than GPUs share them. Default: 4, on 2 or 3 GPUs as many."
BACKENDS = "ep_a2a, naive or allgather_reducescatter; default: EP_A2A_CONFIG's file, EP_A2A_BACKEND, ep_a2a."
GPUS_PER_NODE = "Ranks per virtual node; default: as the machine is."


def demo(
    ranks: Annotated[int | None, opt.number(RANKS, opt.MOST_PROCESSES)] = None,
    device: opt.OnDevice = Device.AUTO,
    tokens: Annotated[int, opt.number("Tokens (words and marks) over all ranks.", opt.MOST_TOKENS)] = 96,
    hidden: Annotated[int, opt.number("Hidden size; rows must be a multiple of 16 bytes.", opt.MOST_HIDDEN)] = 256,
    experts: Annotated[int, opt.number("Experts over all ranks.", opt.MOST_EXPERTS)] = 16,
    topk: Annotated[int, opt.number("Experts per token.", opt.MOST_TOPK)] = 4,
    quant: opt.Cast = Quant.NONE,
    gpus_per_node: Annotated[int | None, opt.number(GPUS_PER_NODE, opt.MOST_PROCESSES)] = None,
    backend: Annotated[str | None, typer.Option(help=BACKENDS)] = None,
    as_json: opt.AsJson = False,
    output: opt.Output = None,
    seed: opt.Seed = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Send text through an expert-parallel layer and a dense one.

    The exit code is 1 where their results differ.
    """
    options = SimpleNamespace(**locals())
    from ep_a2a.commands.demo.run import DemoSettings, execute
    from ep_a2a.commands.files import check_can_write
    from ep_a2a.commands.ranks import choose_device, default_ranks

    check_can_write(output)
    kind = choose_device(device)
    name, reason = named_backend(backend)
    sizes = given({"gpus_per_node": gpus_per_node, "seed": seed})
    sizes |= {"tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk}
    num_ranks = ranks or default_ranks(kind, DEFAULT_RANKS)
    settings = DemoSettings(num_ranks, kind, quant=quant.value, backend=name, backend_reason=reason, **sizes)
    raise typer.Exit(execute(settings, options))
