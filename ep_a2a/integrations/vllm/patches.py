"""The patches that the processes of a user who chose this backend apply to vLLM; each has an entry in `ledger`."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.common import BACKEND_NAME, warn_once
from ep_a2a.integrations.vllm.engine_error import patch_engine
from ep_a2a.integrations.vllm.settings import unreadable_setting
from ep_a2a.memory.transport_choice import name_network_devices

if TYPE_CHECKING:
    from collections.abc import Callable

COMMUNICATOR_FACTORY = "ep_a2a.integrations.vllm.communicator.make_communicator"

ONE_REPLICA = (
    "--all2all-backend ep_a2a has no effect here: with data parallel size 1 vLLM has all tokens on each of its "
    "tensor-parallel ranks, and adds up with an all-reduce. "
    "--data-parallel-size N (N > 1) with --enable-expert-parallel activates it."
)
WITHOUT_EP = (
    "--all2all-backend ep_a2a has no effect without --enable-expert-parallel: every rank keeps a slice of all "
    "experts, and tokens travel by vLLM's allgather_reducescatter."
)


def activate() -> None:
    """Patches `communicator-class` and `config-check` on this process's platform. Idempotent, and light."""
    from vllm.platforms import current_platform

    if "get_device_communicator_cls" in vars(current_platform):
        return
    # before vLLM makes its first communicator, which is when NCCL looks
    name_network_devices()
    check_and_update_config = current_platform.check_and_update_config

    def check_options_too(vllm_config: Any) -> Any:
        check_options(vllm_config)
        result = check_and_update_config(vllm_config)
        # whoever makes such a configuration is about to be the client of an engine
        if vllm_config.parallel_config.all2all_backend == BACKEND_NAME:
            patch_engine()
        return result

    # on the platform object, in front of its class, which keeps the original
    current_platform.get_device_communicator_cls = lambda: COMMUNICATOR_FACTORY
    current_platform.check_and_update_config = check_options_too


def original_communicator_class() -> Any:
    """The class that the platform itself wants."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(type(current_platform).get_device_communicator_cls())


def check_options(vllm_config: Any) -> None:
    """Refuses what the backend cannot work with, and says where it has no effect, before any process is started.

    Raises:
        UnsupportedError: naming the option.
        EnvironmentVariableError: a variable cannot be read here, where workers inherit it from.
    """
    parallel = vllm_config.parallel_config
    if parallel.all2all_backend != BACKEND_NAME:
        return
    if unreadable := unreadable_setting():
        raise unreadable
    if parallel.data_parallel_rank == 0 and (why := _why_inactive(parallel)):
        warn_once(why)
    if parallel.enable_expert_parallel:
        _check_parallel(vllm_config)


def _why_inactive(parallel: Any) -> str:
    if parallel.data_parallel_size == 1:
        return ONE_REPLICA
    return "" if parallel.enable_expert_parallel else WITHOUT_EP


def _check_parallel(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    refused = {
        "--enable-lora": (vllm_config.lora_config, "vLLM's LoRA layers work with its own backend only"),
        "--enable-elastic-ep": (
            getattr(parallel, "enable_elastic_ep", False), "groups that change their size need vLLM's own communicator"
        ),
        "--enable-dbo": (
            getattr(parallel, "enable_dbo", False), "vLLM runs two micro-batches with the backends on its own list only"
        ),
        "--prefill-context-parallel-size": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1, "its ranks bring different numbers of tokens"
        ),
        "--pipeline-parallel-size": (
            parallel.pipeline_parallel_size > 1,
            "vLLM does not ask stages before the last one whether their step has failed, and would hand out its tokens",
        ),
    }  # fmt: skip
    for option, (is_used, why) in refused.items():
        if is_used:
            raise UnsupportedError(
                f"no {option} with --all2all-backend {BACKEND_NAME}: {why}", option,
                f"Leave {option} out, or use --all2all-backend allgather_reducescatter.",
            )  # fmt: skip


def patch_prepare_finalize() -> None:
    """Patch `prepare-finalize`: MoE layers get ours. In processes that run a model only, since it imports the layers.

    Raises:
        UnsupportedError: the classes and functions that ours are built on have other signatures than those known.
    """
    from vllm.model_executor.layers.fused_moe import all2all_utils

    original = all2all_utils.maybe_make_prepare_finalize
    if getattr(original, "is_ours", False):
        return
    support.check_signatures()
    if hasattr(all2all_utils, "register_moe_prepare_finalize_factory"):
        _register_factory(all2all_utils)
        return
    ours = _wrapped(original)
    # in their dictionaries, since to ask some modules for an attribute is to import others
    for names in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]:
        if names.get("maybe_make_prepare_finalize") is original:
            names["maybe_make_prepare_finalize"] = ours


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_make_prepare_finalize(moe: Any, quant_config: Any, *args: Any, **kwargs: Any) -> Any:
        parallel = moe.moe_parallel_config
        if parallel.all2all_backend != BACKEND_NAME or not parallel.use_all2all_kernels:
            return original(moe, quant_config, *args, **kwargs)
        from ep_a2a.integrations.vllm.layers import make_prepare_finalize

        bound = support.bind(original, moe, quant_config, *args, **kwargs)
        if bound.get("allow_new_interface", False):
            return make_prepare_finalize(moe, use_monolithic=bound.get("use_monolithic", False))
        # asked up to vLLM 0.27 by methods that own no modular kernel, and would refuse one
        return None

    maybe_make_prepare_finalize.is_ours = True  # type: ignore[attr-defined]
    return maybe_make_prepare_finalize


def _register_factory(all2all_utils: Any) -> None:
    """Takes vLLM's own registry (PR #50556) in place of the patch."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareFinalizeFactory

    class EpA2AFactory(MoEPrepareFinalizeFactory):  # type: ignore[misc]
        """Makes ours for layers of the backend's name."""

        backend_name = BACKEND_NAME
        supports_sequence_parallel = True

        @classmethod
        def create(cls, *, moe: Any, use_monolithic: bool = False, **_: Any) -> Any:
            """See make_prepare_finalize."""
            from ep_a2a.integrations.vllm.layers import make_prepare_finalize

            return make_prepare_finalize(moe, use_monolithic=use_monolithic)

    if BACKEND_NAME not in all2all_utils._PREPARE_FINALIZE_FACTORIES:
        all2all_utils.register_moe_prepare_finalize_factory(EpA2AFactory)
