"""SGLang's plugin: the hooks that it registers, and what they refuse."""

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.contract import differences, find, folder_of, read_table, version_of
from ep_a2a.log_once import log_once

logger = logging.getLogger(__name__)

DEEPEP_IS_SERVED = "DeepEP is not installed: SGLang uses ep_a2a through DeepEP's interface"

BATCHED = "ep_a2a_low_latency"
"""The backend whose small steps have rows by expert."""
BACKENDS = ("ep_a2a", BATCHED)
OPTION = "--moe-a2a-backend ep_a2a"
LAYERS = "sglang.srt.layers.moe"
SCHEDULER = "sglang.srt.managers.scheduler"
STAGES = "sglang.srt.batch_overlap.operations._StageExecutor"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
CONTRACT = read_table("ep_a2a.integrations.sglang")
OLDEST, NEWEST = "0.5.16", "0.5.23"

FAMILIES = tuple(f"{name}ForCausalLM" for name in ("DeepseekV2", "DeepseekV3", "Glm4Moe", "Qwen2Moe", "Qwen3Moe"))
"""Beginnings of the architectures whose MoE blocks were read: they run shared experts on local tokens, add nothing over
ranks behind combine, and multiply its sums by the routed scaling factor."""

RUNNERS = ("auto", "triton", "deep_gemm")
"""Of --moe-runner-backend: those that take local ids, with -1 in the slots of other ranks' experts."""

UNSUPPORTED = (
    "enable_single_batch_overlap",
    "enable_lora",
    # SGLang then sets the one above, but later
    "lora_paths",
    "elastic_ep_backend",
    # SGLang changes the backend to deepep, and up to 0.5.16 settles two older names of the first one only later
    "enable_prefill_cp",
    "enable_prefill_context_parallel",
    "enable_dsa_prefill_context_parallel",
    "enable_waterfill",
)
"""Fields of ServerArgs that must not be set."""

PLACING = ("enable_eplb", "ep_num_redundant_experts", "init_expert_location")
"""Fields of ServerArgs by which ids of experts differ from the model's."""

_chosen = False

_customized = ""
"""The name of this backend that SGLang's member CUSTOMIZED stands for; another plugin's may have it, too."""


def register() -> None:
    """Registers the hooks; the entry point in the group sglang.srt.plugins.

    SGLang calls it in every process and swallows its errors, so hooks refuse what cannot be served. A process that has
    not imported the scheduler runs no model, and gets the hooks on the command line alone.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    # up to 0.5.16 the constructor settles the options
    settle = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"
    args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{args}.add_cli_args", _add_choice, HookType.AFTER)
    HookRegistry.register(f"{args}.{settle}", _settle, HookType.BEFORE)
    HookRegistry.register("sglang.srt.configs.model_config.ModelConfig.__init__", _check_family, HookType.AFTER)
    if SCHEDULER not in sys.modules:
        return
    backends, layer = f"{LAYERS}.utils.MoeA2ABackend", f"{LAYERS}.fused_moe_triton.layer"
    HookRegistry.register(f"{backends}._missing_", _member_of, HookType.AROUND)
    HookRegistry.register(f"{backends}.is_flashinfer", _moves_tokens_as_flashinfer, HookType.AROUND)
    HookRegistry.register(f"{LAYERS}.moe_runner.base.FusedOpPool.get_fused_func", _standard_function, HookType.BEFORE)
    HookRegistry.register(f"{layer}.create_moe_dispatcher", _create_dispatcher, HookType.AROUND)
    HookRegistry.register(f"{layer}.FusedMoE.__init__", _finish_layer, HookType.AFTER)
    HookRegistry.register(f"{LAYERS}.token_dispatcher.deepep.DeepEPDispatcher.__init__", _serve_deepep, HookType.BEFORE)
    HookRegistry.register(f"{STAGES}.__init__", _tell_counts, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.Scheduler.__init__", _end_warm_up, HookType.AFTER)
    HookRegistry.register(f"{STREAMER}.stream_output", _check_steps, HookType.BEFORE)
    # ranks without requests stream nothing
    HookRegistry.register(f"{SCHEDULER}.Scheduler.process_batch_result", _check_steps, HookType.AFTER)


def _add_choice(_: None, parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.dest == "moe_a2a_backend" and action.choices is not None:
            action.choices = [*action.choices, *BACKENDS]


def _settle(server_args: Any) -> None:
    """Refuses options that cannot be served, and sets those that the backend needs, before SGLang settles the rest.

    Raises:
        UnsupportedError: an option, this SGLang, or the GPUs' maker.
    """
    global _chosen
    _chosen = server_args.moe_a2a_backend in BACKENDS
    if not _chosen or getattr(server_args, "_resolution_finished", False):
        return
    check_release()
    from ep_a2a.memory.gpus import refuse_other_gpus

    refuse_other_gpus("cuda")
    if refused := _refused_options(server_args):
        raise UnsupportedError(f"no {refused[0]} with {OPTION}", "both", f"Leave {refused[0].split()[0]} out.")
    if server_args.moe_a2a_backend == BATCHED and server_args.moe_runner_backend == "auto":
        server_args.moe_runner_backend = "deep_gemm"
    # as for SGLang's other backends, and as for its FlashInfer all-to-all
    server_args.ep_size = server_args.tp_size
    server_args.disable_shared_experts_fusion = True


def _refused_options(server_args: Any) -> list[str]:
    runner, chunk, stages = server_args.moe_runner_backend, server_args.chunked_prefill_size, server_args.pp_size
    refused = [_option(field) for field in UNSUPPORTED if getattr(server_args, field, None)]
    # in older releases some models' layers hand on the ids that the model has
    if find(_folder() / "srt/layers/moe/topk.py", "resolve_routing_inputs") is None:
        placing = [field for field in PLACING if getattr(server_args, field, None) not in (None, 0, "trivial")]
        refused += [f"{_option(field)} before SGLang 0.5.23" for field in placing]
    runners = RUNNERS if server_args.moe_a2a_backend != BATCHED else ("auto", "deep_gemm")
    if runner not in runners:
        refused.append(f"--moe-runner-backend {runner} (only {', '.join(runners)})")
    if stages > 1:
        refused.append(f"--pp-size {stages}")
    # a step's tokens would have no bound
    if chunk is not None and chunk <= 0:
        refused.append(f"--chunked-prefill-size {chunk}")
    return refused


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def check_release() -> None:
    """Refuses an SGLang that lacks what this integration uses, or has changed it. Imports nothing of SGLang.

    Raises:
        UnsupportedError: naming each name with its change.
    """
    if found := differences(_folder(), CONTRACT):
        raise UnsupportedError(
            f"SGLang {OLDEST} to {NEWEST}, or a later one with the same names, with {OPTION}",
            f"{version_of('sglang')}: {'; '.join(found)}",
            "Install a supported SGLang, or choose another --moe-a2a-backend.",
        )


def _folder() -> Path:
    folder = folder_of("sglang")
    assert folder is not None
    return folder


def _check_family(_: None, config: Any, *args: Any, **kwargs: Any) -> None:
    names = getattr(config.hf_config, "architectures", None) or []
    if _chosen and not any(name.startswith(FAMILIES) for name in names):
        raise UnsupportedError(
            f"a model of {', '.join(FAMILIES)} with {OPTION}",
            f"{', '.join(names) or 'a model that names none'}, whose MoE layers nobody has compared with the backend",
            "Choose another --moe-a2a-backend.",
        )


def _member_of(original: Callable[[type, object], Any], enum: type, value: object) -> Any:
    """Returns SGLang's member for backends that it does not know."""
    global _customized
    if value not in BACKENDS:
        return original(enum, value)
    _customized = str(value)
    return enum.CUSTOMIZED  # type: ignore[attr-defined]


def _is_ours(member: Any) -> bool:
    return bool(_customized) and member.is_customized()


def _moves_tokens_as_flashinfer(original: Callable[[Any], bool], member: Any) -> bool:
    """Says yes for ours, too: local tokens in, their complete sums out, and one graph size on all ranks."""
    return original(member) or _is_ours(member)


def _standard_function(pool: type, dispatch_name: str, runner_name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives our rows to the function for rows of the standard format, which SGLang registers without a backend."""
    is_ours = _customized and dispatch_name == "customized"
    return (pool, "none" if is_ours else dispatch_name, runner_name), {}


def _create_dispatcher(original: Callable[..., Any], moe_runner_config: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, is_tbo_enabled

    if not _is_ours(get_moe_a2a_backend()):
        return original(moe_runner_config, *args, **kwargs)
    from ep_a2a.integrations.sglang.dispatcher import EpA2ADispatcher

    if is_tbo_enabled():
        # SGLang asks it for a number of multiprocessors
        _serve_deepep(None)
    return EpA2ADispatcher(moe_runner_config)


def _tell_counts(_: None, half: Any, *args: Any, **kwargs: Any) -> None:
    """Gives a half of a step (two-batch overlap) the counts of the whole step, since SGLang gives it none."""
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens

    if _customized:
        vars(half).update(_global_num_tokens=get_dp_global_num_tokens())


def _finish_layer(_: None, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Leaves the routed scaling factor to the model, which multiplies the sums of its own tokens by it.

    The expert kernels of the standard format would multiply once more.

    Raises:
        UnsupportedError: see _check_runner.
    """
    from sglang.srt.layers.moe import get_moe_a2a_backend
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    if _is_ours(get_moe_a2a_backend()):
        _check_runner(layer)
        layer.moe_runner_config.routed_scaling_factor = None
        if _customized == BATCHED:
            layer.dispatcher.batch_small_steps(casts=not isinstance(layer.quant_method, UnquantizedFusedMoEMethod))


def _check_runner(layer: Any) -> None:
    """Refuses expert kernels that would take our local ids for global ones. SGLang settles "auto" with the layer.

    Raises:
        UnsupportedError: the layer's runner is none of RUNNERS.
    """
    from sglang.srt.layers.moe import get_moe_runner_backend

    # after 0.5.20 the layer says what runs; before, the runner of its scheme or method does
    runner = getattr(getattr(layer, "scheme", None) or layer.quant_method, "runner", None)
    settled = getattr(layer, "runner_backend", None) or getattr(runner, "runner_backend", None)
    name = "another one" if settled is None else settled.value
    known = ("deep_gemm",) if _customized == BATCHED else RUNNERS[1:]
    # where the options name another one, weights have its layout
    for found, names in ((get_moe_runner_backend().value, ("auto", *known)), (name, known)):
        if found not in names:
            raise UnsupportedError(
                f"expert kernels of {' or '.join(known)} with --moe-a2a-backend {_customized}",
                f"{found}, which SGLang chose for this model",
                f"Add --moe-runner-backend {known[0]}, or choose another --moe-a2a-backend.",
            )


def _end_warm_up(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    for manager in _managers():
        manager.end_warm_up(env.TIMEOUT_SECS.get())


def _check_steps(*args: Any, **kwargs: Any) -> None:
    """Raises the errors of finished steps: the scheduler has waited for their tokens, and graphs run no Python.

    Before tokens are streamed, so that none of a failed step goes out.
    """
    for manager in _managers():
        manager.check()


def _managers() -> list[Any]:
    """Returns the managers of this process; a scheduler without our backend must not load Triton for this."""
    module = sys.modules.get("ep_a2a.integrations.manager")
    return [] if module is None else list(module.live_managers)


def _serve_deepep(_: Any, *args: Any, **kwargs: Any) -> None:
    """Gives SGLang's DeepEP dispatcher our Buffer and Config where no DeepEP is installed.

    The scheduler imports that module before it loads plugins, so an alias in sys.modules would come too late.
    """
    from sglang.srt.layers.moe.token_dispatcher import deepep

    if deepep.use_deepep or importlib.util.find_spec("deep_ep") is not None:
        return
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    from ep_a2a.compat import deep_ep

    log_once(logger, logging.WARNING, DEEPEP_IS_SERVED)
    deepep.Buffer, deepep.Config, deepep.use_deepep = deep_ep.Buffer, deep_ep.Config, True
    deepep.sglang_per_token_group_quant_fp8 = sglang_per_token_group_quant_fp8
