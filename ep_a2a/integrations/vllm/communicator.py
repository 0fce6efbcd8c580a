"""Makes vLLM's communicators: the expert-parallel group's carries our manager, and its MoE layers get our exchange.

vLLM calls `make_communicator` in every process that runs a model. The first expert-parallel group applies the patches
to layers and workers there.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from ep_a2a.integrations.manager import live_managers
from ep_a2a.integrations.vllm.common import BATCHED_NAME, NAMES, VLLM_BACKEND, logger
from ep_a2a.integrations.vllm.manager import VllmAll2AllManager
from ep_a2a.integrations.vllm.micro_batches import patch_micro_batches
from ep_a2a.integrations.vllm.stages import link_stages
from ep_a2a.integrations.vllm.worker import patch_worker


def make_communicator(*args: Any, **kwargs: Any) -> Any:
    """Returns the platform's communicator for one of vLLM's groups; arguments are those of the platform's class."""
    from vllm.config.vllm import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import get_pp_group

    original = original_communicator_class()
    config = get_current_vllm_config_or_none()
    is_ep = str(kwargs.get("unique_name", "")).split(":")[0] == "ep"
    if config is None or not is_ep or config.parallel_config.all2all_backend not in NAMES:
        return original(*args, **kwargs)
    parallel = config.parallel_config
    name = parallel.all2all_backend
    # the platform's class knows only vLLM's names, and logs the one that it is given
    parallel.all2all_backend = VLLM_BACKEND
    vllm_logger = logging.getLogger(original.__module__)
    vllm_logger.addFilter(_says_nothing_of_managers)
    try:
        communicator = original(*args, **kwargs)
    finally:
        parallel.all2all_backend = name
        vllm_logger.removeFilter(_says_nothing_of_managers)
    communicator.all2all_backend = name
    if not (communicator.use_all2all and parallel.enable_expert_parallel):
        return communicator
    patch_prepare_finalize()
    patch_activation_format()
    patch_worker()
    if parallel.pipeline_parallel_size > 1:
        link_stages(get_pp_group(), lambda: [word for manager in live_managers for word in manager.poison_words()])
    if communicator.device.type == "cpu":
        patch_runner()
    num_micro_batches = 1
    if parallel.use_ubatching:
        patch_micro_batches()
        num_micro_batches = parallel.num_ubatches
    # vLLM's destroys it with the communicator
    communicator.all2all_manager = VllmAll2AllManager(
        communicator,
        communicator.all2all_manager,
        num_micro_batches,
        support_fault_tolerance=getattr(parallel, "enable_fault_tolerance", False),
    )
    logger.debug("the communicator of %s carries the ep_a2a manager", communicator.unique_name)
    return communicator


def _says_nothing_of_managers(record: logging.LogRecord) -> bool:
    return "all2all manager" not in str(record.msg)


def original_communicator_class() -> Any:
    """Returns the communicator class of the platform itself."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(type(current_platform).get_device_communicator_cls())


@functools.cache
def patch_prepare_finalize() -> None:
    """Patch `prepare-finalize`: MoE layers whose tokens travel get our prepare/finalize. Imports vLLM's layers."""
    from vllm.model_executor.layers.fused_moe import all2all_utils

    original = all2all_utils.maybe_make_prepare_finalize
    replacement = _replacing(original)
    # modules' dictionaries, because reading an attribute of a lazy module would import others
    for names in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]:
        if names.get("maybe_make_prepare_finalize") is original:
            names["maybe_make_prepare_finalize"] = replacement


def _replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_make_prepare_finalize(moe: Any, quant_config: Any, *args: Any, **kwargs: Any) -> Any:
        moe_parallel = moe.moe_parallel_config
        if moe_parallel.all2all_backend not in NAMES or not moe_parallel.use_all2all_kernels:
            return original(moe, quant_config, *args, **kwargs)
        from ep_a2a.integrations.vllm.prepare_finalize import make_prepare_finalize

        bound = inspect.signature(original).bind(moe, quant_config, *args, **kwargs).arguments
        if bound.get("allow_new_interface", False):
            return make_prepare_finalize(moe, use_monolithic=bound.get("use_monolithic", False))
        # in vLLM 0.26, methods without a modular kernel ask too, and would refuse one
        return None

    return maybe_make_prepare_finalize


@functools.cache
def patch_activation_format() -> None:
    """Patch `activation-format`: experts of the batched format are chosen for the name that gives it. Idempotent."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.platforms import current_platform

    original = FusedMoEParallelConfig.use_batched_activation_format.fget

    def use_batched_activation_format(self: Any) -> bool:
        is_chosen = self.use_all2all_kernels and self.all2all_backend == BATCHED_NAME
        # vLLM has no such experts for CPUs
        return bool(original(self)) or (is_chosen and not current_platform.is_cpu())

    FusedMoEParallelConfig.use_batched_activation_format = property(use_batched_activation_format)


@functools.cache
def patch_runner() -> None:
    """Patch `cpu-runner`: calls MoE layers as opaque operators, as on GPUs. Idempotent.

    On CPU vLLM calls them as Python, for torch.compile to trace. An exchange between processes cannot be traced.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    original = MoERunner._select_forward

    @functools.wraps(original)
    def _select_forward(self: Any) -> Any:
        moe_parallel = self.moe_config.moe_parallel_config
        if moe_parallel.all2all_backend not in NAMES or not moe_parallel.use_all2all_kernels:
            return original(self)
        return torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared

    MoERunner._select_forward = _select_forward
