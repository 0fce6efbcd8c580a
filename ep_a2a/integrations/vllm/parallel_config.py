"""The parallel configuration of a user who chose this backend: it activates the patches, and checks the options.

vLLM sends its configuration to engines and workers by pickle. Unpickling EpA2AParallelConfig in such a process imports
this module and applies the patches. No environment variable is needed, and other users are not affected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.config.parallel import ParallelConfig

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.common import BACKEND_NAME, BATCHED_NAME, NAMES, VLLM_BACKEND, warn_once
from ep_a2a.memory.transport_choice import name_network_devices

COMMUNICATOR_FACTORY = "ep_a2a.integrations.vllm.communicator.make_communicator"

ACCEPTED_BACKEND = "deepep_low_latency"
"""A name on vLLM's list of the backends with which it splits steps; no other check of vLLM concerns it."""

ONE_REPLICA = (
    "--all2all-backend ep_a2a has no effect here: with data parallel size 1 vLLM has all tokens on each of its "
    "tensor-parallel ranks, and adds up with an all-reduce. "
    "--data-parallel-size N (N > 1) with --enable-expert-parallel activates it."
)
WITHOUT_EP = (
    "--all2all-backend ep_a2a has no effect without --enable-expert-parallel: every rank keeps a slice of all "
    "experts, and tokens travel by vLLM's allgather_reducescatter."
)

ON_CPU = (
    f"--all2all-backend {BATCHED_NAME} is {BACKEND_NAME} on CPU: vLLM has no experts there that take rows by expert."
)


class EpA2AParallelConfig(ParallelConfig):  # type: ignore[misc]
    """vLLM's ParallelConfig with a name of this backend. Unpickling it in a worker applies the patches."""

    @property
    def use_sequence_parallel_moe(self) -> bool:
        """Whether tensor-parallel ranks bring distinct tokens; as for the backends on vLLM's own list."""
        if self.all2all_backend not in NAMES:
            return bool(super().use_sequence_parallel_moe)
        return bool(self.enable_expert_parallel and self.tensor_parallel_size > 1 and self.data_parallel_size > 1)

    @property
    def use_batched_dp_moe(self) -> bool:
        """Whether a step's default number of tokens is small; as for the backends on vLLM's own list."""
        if self.all2all_backend not in NAMES:
            return bool(super().use_batched_dp_moe)
        is_batched = self.all2all_backend == BATCHED_NAME
        return bool(is_batched and self.enable_expert_parallel and self.data_parallel_size > 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        activate()


def choose(config: ParallelConfig) -> None:
    """Turns a ParallelConfig with our backend's name into an EpA2AParallelConfig, and activates it in this process.

    Raises:
        UnsupportedError: this vLLM lacks what the integration uses.
    """
    # a copy, in whatever process, is of a configuration that has been checked
    if not isinstance(config, EpA2AParallelConfig):
        support.check()
    config.__class__ = EpA2AParallelConfig
    activate()


def activate() -> None:
    """Applies `communicator-class`, `config-check` and `micro-batch-backend` in this process.

    Idempotent; imports no layers.
    """
    from vllm.config.vllm import VllmConfig
    from vllm.platforms import current_platform

    if "get_device_communicator_cls" in vars(current_platform):
        return
    # NCCL reads the names when vLLM makes its first communicator
    name_network_devices()
    check_and_update_config = current_platform.check_and_update_config

    def check_options_too(vllm_config: Any) -> Any:
        check_options(vllm_config)
        result = check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.all2all_backend in NAMES and parallel.use_ubatching:
            # what follows is vLLM's check of the name
            parallel.all2all_backend = ACCEPTED_BACKEND
        return result

    # on the platform object, in front of its class, which keeps the original
    current_platform.get_device_communicator_cls = lambda: COMMUNICATOR_FACTORY
    current_platform.check_and_update_config = check_options_too
    VllmConfig.__post_init__ = _giving_the_name_back(VllmConfig.__post_init__)


def _giving_the_name_back(post_init: Callable[..., None]) -> Callable[..., None]:
    """Wraps `VllmConfig.__post_init__`, which refuses to split steps with backends that are not on its own list."""

    @functools.wraps(post_init)
    def __post_init__(self: Any, *args: Any) -> None:
        parallel = self.parallel_config
        name = parallel.all2all_backend
        try:
            post_init(self, *args)
        finally:
            if name in NAMES and parallel.all2all_backend == ACCEPTED_BACKEND:
                parallel.all2all_backend = name

    return __post_init__


def check_options(vllm_config: Any) -> None:
    """Refuses options that the backend cannot work with, before processes start.

    Where the backend has no effect it warns, and chooses vLLM's, whose name other options are checked with.

    Raises:
        UnsupportedError: naming the option.
        EnvironmentVariableError: a variable that workers will inherit cannot be parsed here.
    """
    parallel = vllm_config.parallel_config
    if parallel.all2all_backend not in NAMES:
        return
    env.check_values()
    if why := _why_inactive(parallel):
        if parallel.data_parallel_rank == 0:
            warn_once(why)
        parallel.all2all_backend = VLLM_BACKEND
        return
    _check_parallel(vllm_config)
    from vllm.platforms import current_platform

    if parallel.all2all_backend == BATCHED_NAME and current_platform.is_cpu() and parallel.data_parallel_rank == 0:
        warn_once(ON_CPU)


def _why_inactive(parallel: Any) -> str:
    """Why no layer's tokens will travel by this backend; "" where they may."""
    uses_ep = parallel.enable_expert_parallel
    # these options give the expert-parallel group further ranks, elastic EP while the engine runs
    grows = parallel.enable_elastic_ep or parallel.prefill_context_parallel_size > 1
    if parallel.data_parallel_size == 1 and not (uses_ep and grows):
        return ONE_REPLICA
    return "" if uses_ep else WITHOUT_EP


def _uses_old_ray_executor(parallel: Any) -> bool:
    """Whether Ray's workers are called by vLLM's first executor for them, which 0.26 to 0.32 have beside the second."""
    from vllm import envs

    is_ray = parallel.distributed_executor_backend == "ray"
    return is_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)


def _check_parallel(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    splits_with_lora = parallel.use_ubatching and vllm_config.lora_config
    brings_ranks = parallel.prefill_context_parallel_size > 1
    refused = {
        "--enable-dbo with --enable-lora": (splits_with_lora, "LoRA layers cannot tell micro-batches apart"),
        "--enable-elastic-ep": (parallel.enable_elastic_ep, "groups that grow need vLLM's own communicator"),
        "--prefill-context-parallel-size": (brings_ranks, "its ranks bring different numbers of tokens"),
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 with --distributed-executor-backend ray": (
            _uses_old_ray_executor(parallel),
            "that executor hands out tokens of steps that have failed",
        ),
    }
    for option, (is_used, why) in refused.items():
        if is_used:
            # vLLM splits no steps with its own backend
            other = "" if " with " in option else f", or use --all2all-backend {VLLM_BACKEND}"
            remedy = f"Leave {option.replace(' with ', ' or ')} out{other}."
            raise UnsupportedError(f"no {option}, with --all2all-backend {BACKEND_NAME}: {why}", option, remedy)
