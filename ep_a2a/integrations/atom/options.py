"""Checks ATOM's settings: which the backend refuses, and with which it has no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.config import COMBINE_QUANT_TYPES
from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_options(config: Any, envs: Any) -> None:
    """Refuses settings that would need MORI's own kernels.

    ATOM's own `--all2all-backend` is not checked: both of its values run the same kernels here.

    Args:
        config: ATOM's Config, or None. envs: atom.utils.envs.

    Raises:
        UnsupportedError: naming the setting and the remedy.
    """
    known = [each.value for each in COMBINE_QUANT_TYPES]
    refused = {
        "--moe-backend mega": (
            getattr(config, "moe_backend", "standard") == "mega",
            "its kernels move tokens themselves, with MORI",
            "Use --moe-backend standard.",
        ),
        "ATOM_MORI_V2=1": (envs.ATOM_MORI_V2, "that is MORI's second op interface", "Unset ATOM_MORI_V2."),
        "ATOM_MORI_FP4_DISPATCH=1": (
            envs.ATOM_MORI_FP4_DISPATCH,
            "fp4 rows do not travel here",
            "Unset ATOM_MORI_FP4_DISPATCH.",
        ),
        f"ATOM_MORI_COMBINE_QUANT={envs.ATOM_MORI_COMBINE_QUANT}": (
            envs.ATOM_MORI_COMBINE_QUANT not in known,
            f"combine's rows travel as {', '.join(known)}",
            "Set ATOM_MORI_COMBINE_QUANT to one of these, or unset it.",
        ),
    }
    for setting, (is_used, why, remedy) in refused.items():
        if is_used:
            raise UnsupportedError(f"no {setting} with EP_A2A_BACKEND: {why}", setting, remedy)


def why_inactive(config: Any) -> str | None:
    """Returns why ATOM exchanges no tokens between ranks with this Config; None if it does."""
    return next(_reasons(config), None)


def _reasons(config: Any) -> Iterator[str]:
    if not config.enable_expert_parallel:
        yield "without --enable-expert-parallel every rank has a slice of all experts"
    if config.parallel_config.data_parallel_size <= 1:
        yield "with data parallel size 1 all ranks have the same tokens"
    if config.dp_logical_size > config.parallel_config.data_parallel_size:
        yield "a simulated deployment exchanges no tokens"
