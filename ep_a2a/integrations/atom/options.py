"""Refuses settings of ATOM that the backend cannot serve."""

from __future__ import annotations

from typing import Any

from ep_a2a.config import COMBINE_QUANT_TYPES
from ep_a2a.errors import UnsupportedError


def check_options(config: Any, envs: Any) -> None:
    """Refuses settings that would need MORI's own kernels, or RCCL's exchange.

    Both modes of MORI that `--all2all-backend` names run the same kernels here; with "none" layers exchange nothing.

    Args:
        config: ATOM's Config, or None. envs: atom.utils.envs.

    Raises:
        UnsupportedError: naming the setting and the remedy.
    """
    known = [each.value for each in COMBINE_QUANT_TYPES]
    mega = getattr(config, "moe_backend", "standard") == "mega"
    combine_quant = envs.ATOM_MORI_COMBINE_QUANT
    refused = {
        # no field of ATOM's Config before its pull request 2110
        "--all2all-backend rccl": (getattr(config, "moe_all2all_backend", "") == "rccl", "that is ATOM's own exchange"),
        "--moe-backend mega": (mega, "its kernels move tokens themselves, with MORI"),
        "ATOM_MORI_V2=1": (envs.ATOM_MORI_V2, "that is MORI's second op interface"),
        "ATOM_MORI_FP4_DISPATCH=1": (envs.ATOM_MORI_FP4_DISPATCH, "fp4 rows do not travel here"),
        f"ATOM_MORI_COMBINE_QUANT={combine_quant}": (
            combine_quant not in known,
            f"combine's rows travel as {', '.join(known)}",
        ),
    }
    for setting, (is_used, why) in refused.items():
        if is_used:
            raise UnsupportedError(f"no {setting} with EP_A2A_BACKEND: {why}", setting, f"Leave {setting} out.")
