"""Patches of ATOM, in processes whose user chose a backend: two methods of its MoE layers, and the module mori.

FusedMoEMethodBase._maybe_make_prepare_finalize: returns our prepare/finalize instead of MORI's.
FusedMoEMethodBase.maybe_make_prepare_finalize: also warns, once, if a layer exchanges no tokens.
mori: without an installed MORI, `import mori` imports ep_a2a.compat.mori; ATOM looks for the module.
"""

import functools
import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

from ep_a2a.compat import mori
from ep_a2a.config import COMBINE_QUANT_TYPES
from ep_a2a.errors import UnsupportedError, max_tokens_named
from ep_a2a.integrations.atom.manager import install_manager
from ep_a2a.integrations.atom.prepare_finalize import AtomPrepareAndFinalize
from ep_a2a.integrations.contract import differences, read_table
from ep_a2a.integrations.dispatcher import Dispatcher
from ep_a2a.log_once import log_once
from ep_a2a.managers.base import All2AllManagerBase

logger = logging.getLogger(__name__)

NO_EFFECT = (
    "EP_A2A_BACKEND has no effect on ATOM's MoE layers: they exchange tokens with --enable-expert-parallel and a data "
    "parallel size above 1, and not with --all2all-backend none, ATOM_DISABLE_MORI_EP or in simulated deployments"
)
CONTRACT = read_table("ep_a2a.integrations.atom")


def provide_mori() -> None:
    """Makes `import mori` work where no MORI is installed. An installed one stays, for ATOM's KV transfer."""
    if importlib.util.find_spec("mori") is None:
        mori.install()


def patch_layers(module: Any) -> None:
    """Patches the layers of atom.model_ops.moe. Idempotent.

    Raises:
        UnsupportedError: their signatures have changed.
    """
    base = module.FusedMoEMethodBase
    if getattr(base, "_maybe_make_prepare_finalize", None) is make_prepare_finalize:
        return
    if found := differences(Path(module.__file__).parents[1], CONTRACT):
        raise UnsupportedError(
            "the ATOM that docs/atom.md names", "; ".join(found), "Unset EP_A2A_BACKEND, or install that ATOM."
        )
    original = base.maybe_make_prepare_finalize

    @functools.wraps(original)
    def maybe_make_prepare_finalize(self: Any) -> Any:
        made = original(self)
        if made is None:
            log_once(logger, logging.WARNING, NO_EFFECT)
        return made

    base._maybe_make_prepare_finalize = staticmethod(make_prepare_finalize)
    base.maybe_make_prepare_finalize = maybe_make_prepare_finalize


def make_prepare_finalize(moe: Any, quant_config: Any) -> AtomPrepareAndFinalize:
    """Returns ATOM's prepare/finalize of a layer, on our op. Collective.

    Args:
        moe: ATOM's FusedMoEConfig of the layer. quant_config: without effect, because rows travel unquantised.

    Raises:
        UnsupportedError: a setting of ATOM does not work with it; see check_options.
    """
    envs, ubatching = _atom("utils.envs"), _atom("utils.tbo.ubatching")
    check_options(_atom("config").get_current_atom_config(), envs)
    parallel_state = importlib.import_module("aiter.dist.parallel_state")
    manager = install_manager(parallel_state.get_ep_group().device_communicator)
    kwargs = handle_kwargs(moe, manager, envs.ATOM_MORI_COMBINE_QUANT)
    indices = (1, 2, 0) if ubatching.tbo_enabled() else (0,)
    with max_tokens_named("--max-num-batched-tokens"):
        *halves, whole = [Dispatcher(manager.get_handle(kwargs, index)) for index in indices]
    kernels = _atom("model_ops.fused_moe.modular_kernel")
    return AtomPrepareAndFinalize(whole, halves, kernels, ubatching)


def handle_kwargs(moe: Any, manager: All2AllManagerBase, combine_quant: str) -> dict[str, Any]:
    """Returns AITER's handle kwargs for a layer, as ATOM makes them, but without scales: rows travel unquantised.

    Args:
        moe: ATOM's FusedMoEConfig. manager: of the group. combine_quant: the cast of combine's rows, or "none".
    """
    return {
        "rank": manager.rank,
        "num_ep_ranks": manager.world_size,
        "input_dtype": moe.in_dtype,
        "quant_dtype": moe.in_dtype,
        "token_hidden_size": moe.hidden_dim,
        "scale_dim": 0,
        "scale_type_size": 4,
        "max_num_tokens_per_dp_rank": moe.max_num_tokens,
        "num_local_experts": moe.num_local_experts,
        "num_experts_per_token": moe.experts_per_token,
        "gpu_per_node": moe.moe_parallel_config.local_ep_size,
        "quant_type": combine_quant,
    }


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


def _atom(name: str) -> Any:
    """Imports a module of ATOM."""
    return importlib.import_module(f"atom.{name}")
