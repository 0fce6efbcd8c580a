"""Makes the launches of one call shape: kernels, launch numbers and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ep_a2a.kernels.compilation import compile_all
from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE, Stages
from ep_a2a.tuning.policy import SPEAKERS, Launch, Phase, fit

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.compiled_kernel import CompiledKernel

VariantOf = Callable[[Launch, Stages], "CompiledKernel"]
ValuesOf = Callable[[Launch], tuple[Any, ...]]
Launches = Iterator[tuple["CompiledKernel", tuple[Any, ...], int]]
"""Kernel, run-time arguments and programs of each launch, in order."""
LaunchPlan = tuple[tuple["CompiledKernel", Launch, int], ...]
"""Launches in order: kernel, launch numbers, programs."""


def make_plan(
    config: EpDispatchCombineConfig,
    phase: Phase,
    launch: Launch,
    stages: Stages,
    variant_of: VariantOf,
    values_of: ValuesOf,
    num_sms: int,
    max_sms: int,
    is_interpreted: bool,
) -> LaunchPlan:
    """The launches of a call that does `stages`. Kernels are compiled: the registers that they got bound the programs.

    Args:
        config: of the op.
        phase, launch: of the whole call, as the policy has them.
        variant_of: the kernel of a part. values_of: its run-time arguments.
        num_sms: multiprocessors of the device. max_sms: most of them that the call may occupy; 0 = all.
        is_interpreted: nothing is compiled.
    """
    plan = []
    variants = [(variant_of(launch, part), part) for part in _parts(phase, stages, is_interpreted=is_interpreted)]
    if not is_interpreted:
        compile_all(((variant, values_of(launch)) for variant, _ in variants), config)
    for variant, part in variants:
        fitted = _fitted(launch, phase, variant, num_sms, max_sms)
        plan.append((variant, fitted, _num_programs(fitted, phase, part)))
    return tuple(plan)


def _parts(phase: Phase, stages: Stages, *, is_interpreted: bool) -> tuple[Stages, ...]:
    """The interpreter, which runs programs in turn, cannot send and receive in one launch where programs wait."""
    if is_interpreted and stages == WHOLE and phase is not Phase.DISPATCH:
        return (SEND, RECEIVE)
    return (stages,)


def _fitted(launch: Launch, phase: Phase, variant: CompiledKernel, num_sms: int, max_sms: int) -> Launch:
    """The launch cut down to what the registers of its kernel leave room for, once they are known."""
    if variant.programs_per_sm is None:
        return launch
    most = num_sms * variant.programs_per_sm
    if 0 < max_sms < num_sms:
        most = min(most, max_sms)
    return launch if launch.num_programs <= most else fit(launch, phase, most)


def _num_programs(launch: Launch, phase: Phase, stages: Stages) -> int:
    """Programs of a launch that does these stages."""
    if stages == WHOLE:
        return launch.num_programs
    if phase is Phase.DISPATCH:
        return launch.num_programs if stages.send else 1
    return SPEAKERS[phase] + (launch.num_senders if stages.send else launch.num_receivers)
