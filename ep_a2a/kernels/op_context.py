"""What device functions know about their op, as one argument."""

from typing import Any

import triton.language as tl

from ep_a2a.kernels.constants import Shape
from ep_a2a.kernels.triton_parts import aggregate

LAUNCH_CONSTANTS = ("OWNERS", "ROW", "LINE", "BULK", "TILE", "LL", "COMBINE", "FORM")
"""Named tuples of kernels/constants.py that a kernel may hand to its device functions with the op."""


@aggregate
class OpContext:
    """An op and a launch as the device functions of a rank see them: one argument of theirs, `op`.

    table: addresses (kernels/layout.py). rank: this rank. The others are known at compile time: the fields of Shape,
    and LAUNCH_CONSTANTS as the kernel has them, else None. In a named tuple they would not be: Triton makes run-time
    values of a tuple's constants where a variable is assigned.
    """

    __annotations__ = dict.fromkeys(("table", "rank", *Shape._fields, *LAUNCH_CONSTANTS), object)

    def __init__(self, table: Any, rank: Any, S: Any, **constants: Any) -> None:
        self.table, self.rank = table, rank
        for name, value in zip(Shape._fields, S.value if isinstance(S, tl.constexpr) else S):
            setattr(self, name, value)
        for name in LAUNCH_CONSTANTS:
            setattr(self, name, constants.get(name, tl.constexpr(None)))

    # Triton compiles no calls of functions that are neither compiled nor its own
    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
