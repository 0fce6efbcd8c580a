"""OpKernels: the compiled kernels of an op, the bounds of its launches, and constants that its engines share."""

from collections.abc import Hashable
from typing import Any

import torch

from ep_a2a.config import EpDispatchCombineConfig, QuantType
from ep_a2a.errors import UnsupportedError
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.constants import LaunchForm
from ep_a2a.kernels.layout import padded
from ep_a2a.kernels.portable import PortableFunction
from ep_a2a.kernels.receive_kernels import count_local_experts_kernel
from ep_a2a.ops.arguments import WHOLE, CombineArguments, Stages, Step
from ep_a2a.ops.launches import TABLE, KernelLaunch, Operands
from ep_a2a.ops.row_constants import ResultRows, placement_of, shape_of
from ep_a2a.policy import COUNT_WARPS

FP8_CAPABILITY = (8, 9)
"""Of the first NVIDIA GPUs that convert to fp8."""
DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
"""Of the first ones that set a launch up while the previous one runs. µs of a round trip of two H200s, fp8 inside
dispatch (30 November; four ranks were not timed):

    tokens                    64    128   256   512   4096
    launches of few tokens    11.8  16.3  24.4  40.8  271
    all launches*             11.8  15.5  23.7  40.4  269
"""
BLOCK_ROWS = 64
"""Received rows whose ids a program looks at at once. Other numbers were not timed."""


class OpKernels:
    """The kernels of one op, made when they are first needed, and the multiprocessors that they may use.

    Args:
        config: the op's.
        table: address table on the device, int64 [regions, W].
        device: where the kernels run; CPU means Triton's interpreter.

    Attributes:
        num_sms: multiprocessors of the device; 0 in the interpreter. max_sms: the most that a launch may use; 0 = all.
        shares_sm: whether products run on these multiprocessors at the same time.
        made: kernels by their descriptions.
        plans: launches of calls under the bound in force, by the form of the call.
        compiled_bounds: the values of `bound` for which `Engine.compile` has compiled.
        spans: whether kernels note times.
        compiled_stages: the kinds of calls whose kernels `Engine.compile` compiles.

    Raises:
        UnsupportedError: the GPU cannot cast to fp8, which the config asks for.
    """

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        self.config, self.table, self.device = config, table, device
        self.interpreted = device.type == "cpu"
        self.capability = (0, 0) if self.interpreted else torch.cuda.get_device_capability(device)
        casts = config.casts_in_dispatch or config.combine_quant != QuantType.NONE
        if not self.interpreted and casts and self.capability < FP8_CAPABILITY:
            raise UnsupportedError(
                f"a GPU of compute capability {FP8_CAPABILITY} or later for casts to fp8",
                str(self.capability),
                "Use quant_type='none', or cast before dispatch.",
            )
        self.num_sms = 0 if self.interpreted else torch.cuda.get_device_properties(device).multi_processor_count
        self.max_sms, self._most_sms = config.max_sms, {"config": config.max_sms}
        self.can_depend = self.capability >= DEPENDENT_LAUNCH_CAPABILITY
        self.shape, self.placement, self.results = shape_of(config), placement_of(config), ResultRows.of(config)
        self.made: dict[Hashable, CompiledKernel] = {}
        self.plans: dict[Hashable, Any] = {}
        self.shares_sm = False
        self._plans_by_bound = {self.bound: self.plans}
        self.compiled_bounds: set[tuple[int, bool]] = set()
        self.spans = False
        self.compiled_stages: tuple[Stages, ...] = (WHOLE,)
        counting = {"S": self.shape, "BLOCK_ROWS": BLOCK_ROWS}
        self.count = CompiledKernel(count_local_experts_kernel, (TABLE, 0, 0, torch.int32), counting, COUNT_WARPS)

    def launch(
        self,
        kernel: PortableFunction,
        operands: Operands,
        read_as: Step | CombineArguments | None,
        constants: dict[str, Any],
        num_warps: int,
        *,
        numbers: tuple[int, ...] = (),
        num_programs: int = 1,
        **options: Any,
    ) -> KernelLaunch:
        """A launch, with the op's kernel of this description: the one that an earlier launch has made, if any.

        Args:
            kernel, constants, num_warps, options: of CompiledKernel.
            operands, numbers, num_programs: as of KernelLaunch.
            read_as: the call's arguments with dtypes in place of tensors; None where kernels read none of them.
        """
        made = CompiledKernel(kernel, operands(read_as, TABLE), constants, num_warps, **options)
        return KernelLaunch(self.made.setdefault(made.key, made), operands, numbers, num_programs)

    @property
    def bound(self) -> tuple[int, bool]:
        """The bound in force: (max_sms, shares_sm)."""
        return self.max_sms, self.shares_sm

    def limit_sms(self, max_sms: int, whose: str, *, shares_sm: bool | None = None) -> None:
        """Sets one of the bounds on multiprocessors; the least counts, 0 = none of this name. shares_sm: None = as set.

        Engines switch between two bounds in every step, so the plans of each are kept.
        """
        self._most_sms[whose] = max_sms
        bound = min(filter(None, self._most_sms.values()), default=0)
        # one that exceeds the device bounds nothing, and needs no kernels of its own
        self.max_sms = 0 if 0 < self.num_sms <= bound else bound
        self.shares_sm = self.shares_sm if shares_sm is None else shares_sm
        self.plans = self._plans_by_bound.setdefault(self.bound, {})

    def forget_plans(self) -> None:
        """Drops the plans of all bounds, and what is known of compiled kernels: launches will be others."""
        for plans in self._plans_by_bound.values():
            plans.clear()
        self.compiled_bounds.clear()

    def form(self, stages: Stages, *, has_weights: bool) -> LaunchForm:
        """Constants that select the stages a launch runs, and the device's options."""
        return LaunchForm(*stages, has_weights, self.can_depend, self.spans)

    def count_lanes(self, threads: int) -> int:
        """Lanes of a wait for three words of every rank (COUNTS), at least the threads of a program."""
        return max(padded(3 * self.config.world_size), threads)
