"""The symbols of vLLM that this integration uses, and a reader of their signatures that does not import vLLM."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MODULAR = "model_executor/layers/fused_moe/modular_kernel.py"
_LAYERS = "model_executor/layers/fused_moe"
_COMMUNICATORS = "distributed/device_communicators"

SYMBOLS: dict[str, tuple[str, ...]] = {
    "config/parallel.py": (
        "All2AllBackend", "ParallelConfig.all2all_backend", "ParallelConfig.__post_init__",
        "ParallelConfig.use_sequence_parallel_moe",
    ),
    "engine/arg_utils.py": ("_compute_kwargs",),
    "utils/import_utils.py": ("resolve_obj_by_qualname",),
    "utils/deep_gemm.py": ("is_deep_gemm_e8m0_used",),
    "forward_context.py": (
        "get_forward_context", "is_forward_context_available", "ForwardContext.dp_metadata",
        "DPMetadata.num_tokens_across_dp_cpu",
    ),
    "platforms/interface.py": ("Platform.get_device_communicator_cls", "Platform.check_and_update_config"),
    "v1/worker/gpu_worker.py": (
        "Worker", "Worker.execute_model", "Worker.sample_tokens", "Worker.execute_dummy_batch",
        "Worker.compile_or_warm_up_model",
    ),
    "v1/executor/multiproc_executor.py": ("WorkerProc.enqueue_output",),
    "v1/engine/core.py": (
        "EngineCoreProc.ENGINE_CORE_DEAD", "EngineCoreProc._send_engine_dead", "EngineCoreProc.process_output_sockets",
    ),
    "v1/engine/core_client.py": ("BackgroundResources.validate_alive",),
    "v1/engine/exceptions.py": ("EngineDeadError.__init__",),
    f"{_COMMUNICATORS}/base_device_communicator.py": (
        "DeviceCommunicatorBase.destroy", "All2AllManagerBase.get_handle", "All2AllManagerBase.dispatch",
        "All2AllManagerBase.dispatch_router_logits", "All2AllManagerBase.combine", "All2AllManagerBase.destroy",
    ),
    f"{_LAYERS}/all2all_utils.py": ("maybe_make_prepare_finalize",),
    f"{_LAYERS}/config.py": (
        "FusedMoEConfig.num_experts", "FusedMoEConfig.experts_per_token", "FusedMoEConfig.hidden_dim",
        "FusedMoEConfig.num_local_experts", "FusedMoEConfig.in_dtype", "FusedMoEConfig.max_num_tokens",
        "FusedMoEConfig.moe_parallel_config", "FusedMoEParallelConfig.sp_size",
        "FusedMoEParallelConfig.all2all_backend", "FusedMoEParallelConfig.use_all2all_kernels",
        "FusedMoEQuantConfig.quant_dtype",
        "FusedMoEQuantConfig.per_act_token_quant", "FusedMoEQuantConfig.block_shape", "FusedMoEQuantConfig.a1_scale",
        "FusedMoEQuantConfig.a1_gscale",
    ),
    f"{_LAYERS}/runner/moe_runner.py": ("MoERunner._select_forward",),
    f"{_LAYERS}/utils.py": ("moe_kernel_quantize_input",),
    f"{_LAYERS}/topk_weight_and_reduce.py": (
        "TopKWeightAndReduceDelegate.apply", "TopKWeightAndReduceContiguous.apply",
    ),
    _MODULAR: (
        "FusedMoEActivationFormat.Standard", "FusedMoEPrepareAndFinalize.post_init_setup",
        "FusedMoEPrepareAndFinalize.activation_format", "FusedMoEPrepareAndFinalize.topk_indices_dtype",
        "FusedMoEPrepareAndFinalize.max_num_tokens_per_rank", "FusedMoEPrepareAndFinalize.num_dispatchers",
        "FusedMoEPrepareAndFinalize.output_is_reduced", "FusedMoEPrepareAndFinalize.supports_async",
        "FusedMoEPrepareAndFinalizeModular.prepare", "FusedMoEPrepareAndFinalizeModular.finalize",
        "FusedMoEPrepareAndFinalizeModular.prepare_async", "FusedMoEPrepareAndFinalizeModular.finalize_async",
        "FusedMoEExpertsModular.apply", "FusedMoEExperts.expects_unquantized_inputs",
    ),
}  # fmt: skip
"""Symbols by file of the package vllm. A function is compared by its parameters, anything else by its presence."""

OPTIONAL = ("v1/engine/",)
"""Beginnings of files whose symbols may differ: without them only the text of errors is poorer (engine_error)."""

MISSING = "missing"


def read_signatures(package: Path) -> dict[str, str]:
    """Returns the signature of each of SYMBOLS in an installed or unpacked vLLM.

    Args:
        package: the folder `vllm`.

    Returns:
        By "file:name": the parameter names of a function ("self, a1, ..."), "there" for other names, or MISSING.
    """
    return {
        f"{path}:{name}": _signature(_definitions(package / path), name)
        for path, names in SYMBOLS.items()
        for name in names
    }


def _signature(definitions: dict[str, ast.AST], name: str) -> str:
    node = definitions.get(name)
    if node is None:
        return MISSING
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any(
        _is_property(each) for each in node.decorator_list
    ):
        return "there"
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg or arguments.kwonlyargs:
        names.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    names += [each.arg for each in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(names)


def _is_property(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "property"


@functools.lru_cache(maxsize=len(SYMBOLS))
def _definitions(path: Path) -> dict[str, ast.AST]:
    """Returns functions, classes and assigned names of a file; members of a class as "Class.name"."""
    if not path.exists():
        return {}
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text()).body:
        found |= _named(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": each for child in node.body for name, each in _named(child).items()}
    return found


def _named(node: ast.stmt) -> dict[str, ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name: node}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id: node for target in targets if isinstance(target, ast.Name)}
