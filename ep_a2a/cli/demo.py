"""`ep-a2a demo`: sends real text through an expert-parallel MoE layer and checks it against the dense layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ep_a2a.commands import options as opt

if TYPE_CHECKING:
    from types import SimpleNamespace

DEFAULT_RANKS = 4
RANKS = "Processes; more than GPUs share them. Default: 4, on 2 or 3 GPUs as many."
A_FILE = {"exists": True, "dir_okay": False}
BACKENDS = "ep_a2a, naive or allgather_reducescatter; default: EP_A2A_CONFIG's file, EP_A2A_BACKEND, ep_a2a."

OPTIONS = (
    opt.number("ranks", RANKS, opt.MOST_PROCESSES),
    opt.DEVICE,
    opt.Option("text", Path, "Text to send; default: the project's README.", limits=A_FILE),
    opt.number("tokens", "Tokens (words and marks) over all ranks.", opt.MOST_TOKENS, 96),
    opt.number("hidden", "Hidden size; rows must be a multiple of 16 bytes.", opt.MOST_HIDDEN, 256),
    opt.number("experts", "Experts over all ranks.", opt.MOST_EXPERTS, 16),
    opt.number("topk", "Experts per token.", opt.MOST_TOPK, 4),
    opt.QUANT,
    opt.Option("gpus_per_node", int, "Ranks per virtual node; default: as the machine is.", limits={"min": 1}),
    opt.Option("backend", str, BACKENDS),
    opt.file("plot", "Write the traffic as a heat map (PNG)."),
    opt.AS_JSON,
    opt.OUTPUT,
    opt.SEED,
)


def run(options: SimpleNamespace) -> int:
    """Send real text through an expert-parallel MoE layer and compare with the dense layer.

    The exit code is 1 where they differ.
    """
    from ep_a2a.commands.demo.model import read_text
    from ep_a2a.commands.demo.run import DemoSettings, execute
    from ep_a2a.commands.files import check_can_write, different_files
    from ep_a2a.commands.ranks import choose_device, default_ranks

    check_can_write(options.output)
    different_files(options.output, options.plot)
    kind = choose_device(options.device.value)
    settings = DemoSettings(
        options.ranks or default_ranks(kind, DEFAULT_RANKS),
        kind,
        options.tokens,
        options.hidden,
        options.experts,
        options.topk,
        options.quant.value,
        options.gpus_per_node,
        *opt.named_backend(options.backend),
        **opt.given({"seed": options.seed}),
    )
    return execute(settings, read_text(options.text, options.tokens), options)
