"""Makes the launches of one call shape: kernels, launch numbers and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ep_a2a.kernels.compilation import compile_all
from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE, Stages
from ep_a2a.tuning.policy import SPEAKERS, Launch, Phase, fit

if TYPE_CHECKING:
    from ep_a2a.kernels.compiled_kernel import CompiledKernel
    from ep_a2a.ops.op_kernels import OpKernels

KernelOf = Callable[[Stages], "CompiledKernel"]
Launches = Iterable[tuple["CompiledKernel", tuple[Any, ...], int]]
"""Kernel, run-time arguments and programs of each launch, in order."""
LaunchPlan = tuple[tuple["CompiledKernel", Launch, int], ...]
"""Launches in order: kernel, launch numbers, programs."""


def make_plan(
    kernels: OpKernels,
    phase: Phase,
    launch: Launch,
    stages: Stages,
    kernel_of: KernelOf,
    values: tuple[Any, ...],
) -> LaunchPlan:
    """The launches of a call that does `stages`. Kernels are compiled: the registers that they got bound the programs.

    Args:
        kernels: of the op.
        phase, launch: of the whole call, as the policy has them.
        kernel_of: the kernel of a launch that does these stages.
        values: run-time arguments like those of the call.
    """
    parts = _parts(phase, stages, is_interpreted=kernels.interpreted)
    found = [(kernel_of(part), part) for part in parts]
    if not kernels.interpreted:
        compile_all(((kernel, values) for kernel, _ in found), kernels.config)
    plan = []
    for kernel, part in found:
        fitted = _fitted(kernels, launch, phase, kernel)
        plan.append((kernel, fitted, _num_programs(fitted, phase, part)))
    return tuple(plan)


def _parts(phase: Phase, stages: Stages, *, is_interpreted: bool) -> tuple[Stages, ...]:
    """The interpreter, which runs programs in turn, cannot send and receive in one launch where programs wait."""
    if is_interpreted and stages == WHOLE and phase is not Phase.DISPATCH:
        return (SEND, RECEIVE)
    return (stages,)


def _fitted(kernels: OpKernels, launch: Launch, phase: Phase, kernel: CompiledKernel) -> Launch:
    """The launch cut down to the programs that the registers of its compiled kernel leave room for."""
    if kernel.programs_per_sm is None:
        return launch
    most = kernels.num_sms * kernel.programs_per_sm
    if 0 < kernels.max_sms < kernels.num_sms:
        most = min(most, kernels.max_sms)
    return launch if launch.num_programs <= most else fit(launch, phase, most)


def _num_programs(launch: Launch, phase: Phase, stages: Stages) -> int:
    """Programs of a launch that does these stages."""
    if stages == WHOLE:
        return launch.num_programs
    if phase is Phase.DISPATCH:
        return launch.num_programs if stages.send else 1
    return SPEAKERS[phase] + (launch.num_senders if stages.send else launch.num_receivers)
