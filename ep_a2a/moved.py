"""Import paths of version 0.1 that lead to today's modules, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, ModuleType

# Old package, new package: modules, each as `name` or as `old=new`. Longer old paths win over shorter ones.
_MODULES = {
    ("ep_a2a", "ep_a2a"): """
        bench=commands.bench communicator=parallel.communicator config_enums=config.enums config_fields=config.op_config
        config_file=config.file doctor=commands.doctor group_coordinator=parallel.group_coordinator
        kernel_choice=config.enums parallel_state=parallel.state policy=tuning.policy profiling=telemetry
        profiling.timeline=commands.trace.timeline simulation=commands.simulation topology_report=topology.facts
        trusted_folders=path_security tuning_parse=tuning.parse versions=topology.facts""",
    ("ep_a2a.bench", "ep_a2a.commands"): """
        contender=bench.contenders drive=bench.launcher environment=bench.report layer_experts=bench.layer_model
        layer_report=bench.layer ours=bench.native plot=bench.picture run=bench.worker sweep=bench.workload
        traced=trace.steps tune=tune.search wire_cuda=bench.wire_push""",
    ("ep_a2a.cli", "ep_a2a.commands"): """
        backends_view=backends demo_check=demo.check demo_drive=demo.worker demo_model=demo.model
        demo_report=demo.report demo_run=demo.worker demo_settings=demo.settings demo_view=demo.view log
        plan_model=plan.model plan_nodes=plan.nodes plan_nodes_plot=plan.nodes_plot plan_nodes_view=plan.nodes_view
        plan_sizes=plan.sizes plan_view=plan.view plan_vllm=plan.vllm plot=plotting values=options""",
    ("ep_a2a.compat", "ep_a2a.compat"): """
        ep_low_latency=triton_distributed mori.ops.combine_input=mori.ops.dispatch_combine
        mori.ops.counting=mori.ops.local_expert_count mori.ops.not_here=mori.unsupported mori.refused=mori.unsupported
        mori.world=mori.shmem_context""",
    ("ep_a2a.doctor", "ep_a2a.commands.doctor"): """
        ask=subprocess_probe choice=backend_verdict finding=diagnostic machine=system_info""",
    ("ep_a2a.integrations", "ep_a2a.integrations"): """
        atom.around_import=atom.import_hook vllm.chosen=vllm.parallel_config vllm.layers=vllm.prepare_finalize
        vllm.name=vllm.plugin vllm.patches=vllm.parallel_config vllm.step=vllm.prepare_finalize""",
    ("ep_a2a.kernels", "ep_a2a.kernels"): """
        dispatch_kernels=bulk_dispatch_kernels far_kernels=remote_mirror_kernels flagged_kernels=ll_dispatch_kernels
        flagged_receive_kernels=ll_receive_kernels late_weights_kernels=combine_time_weights_kernels portable=jit
        rail_kernels=staged_kernels rings=ring_shape variants=compiled_kernel""",
    ("ep_a2a.kernels", "ep_a2a.ops"): """
        arguments base_op=base expert_major expert_sources=introspection failures inputs inter_node=rings intra_node
        late_weights=combine_time_weights op op_memory=memory open_step=introspection plans=launch_plan row_constants
        stand_ins=warmup_args told=peer_failures wait_bounds=timeouts""",
    ("ep_a2a.kernels", "ep_a2a.telemetry"): "counted=counters spans=device_clock",
    ("ep_a2a.managers", "ep_a2a"): "cache=managers.base handle_kwargs=config.handle_kwargs names=errors",
    ("ep_a2a.managers", "ep_a2a.managers.external"): """
        deepep_buffers deepep_high_throughput deepep_low_latency deepep_v2 flashinfer_exchange flashinfer_one_sided
        flashinfer_two_sided libraries library_manager library_op mori one_group=single_group_guard pplx
        received_rows""",
    ("ep_a2a.managers", "ep_a2a.ops"): """
        checked_op=front collective_op=collective op_buffers op_factory=factory row_exchange
        without_effect=ignored_options""",
    ("ep_a2a.memory", "ep_a2a.memory"): """
        allocate=arena pools=allocator_isolation rail_arrivals=transport_arrivals rail_choice=transport_choice
        rails=node_transport streams=use_order""",
}

MOVED = {
    f"{old_package}.{old}": f"{new_package}.{new or old}"
    for (old_package, new_package), modules in _MODULES.items()
    for old, _, new in (module.partition("=") for module in modules.split())
}
"""Old path to new; modules below an old package are found below the new one."""


def moved_names(module: str, new_module: str, names: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that answers for names which moved to another module, with a DeprecationWarning.

    Args:
        module: path of the module that had the names.
        new_module: path of the module that has them.
        names: the names, separated by blanks.
    """
    moved = frozenset(names.split())

    def get(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} has moved to {new_module}; import it from there.", DeprecationWarning, stacklevel=2
        )
        return getattr(importlib.import_module(new_module), name)

    return get


def new_path(name: str) -> str | None:
    """Today's path of a module that has moved, or None."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if target := MOVED.get(".".join(parts[:length])):
            return ".".join((target, *parts[length:]))
    return None


class MovedFinder(MetaPathFinder):
    """Finds modules by their old paths; comes first, since a moved package would find its old submodules twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec whose loader answers with the module at the new path; None for any other name."""
        moved_to = new_path(fullname) if fullname.startswith("ep_a2a.") else None
        found = None if moved_to is None else importlib.util.find_spec(moved_to)
        if moved_to is None or found is None:
            return None
        spec = ModuleSpec(fullname, _MovedLoader(moved_to), origin=found.origin)
        spec.submodule_search_locations = None if found.submodule_search_locations is None else []
        return spec


class _MovedLoader(Loader):
    def __init__(self, moved_to: str) -> None:
        self._moved_to = moved_to

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module at the new path in the old one's place, which import then returns."""
        import sys

        warnings.warn(
            f"{module.__name__} has moved to {self._moved_to}; import it from there.", DeprecationWarning, stacklevel=2
        )
        sys.modules[module.__name__] = importlib.import_module(self._moved_to)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the new module, for `python -m` with an old path."""
        spec = importlib.util.find_spec(self._moved_to)
        return None if spec is None or spec.loader is None else spec.loader.get_code(self._moved_to)  # type: ignore[attr-defined]
