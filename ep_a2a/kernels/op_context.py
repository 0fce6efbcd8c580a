"""What device functions know about their op, as one argument."""

from typing import Any

import triton.language as tl

from ep_a2a.kernels.constants import Shape
from ep_a2a.kernels.triton_parts import aggregate


@aggregate
class OpContext:
    """An op as the device functions of a rank see it: one argument of theirs, `op`.

    table: addresses (kernels/layout.py). rank: this rank. The others are the fields of Shape, known at compile time. In
    a named tuple they would not be: Triton makes run-time values of a tuple's constants where a variable is assigned.
    """

    table: object
    rank: object
    WORLD_SIZE: object
    WORLD_LANES: object
    TOPK: object
    TOPK_LANES: object
    COMPACT: object
    LOCAL_IDS_OF: object
    MASKS: object

    def __init__(self, table: Any, rank: Any, S: Any) -> None:
        self.table, self.rank = table, rank
        for name, value in zip(Shape._fields, S.value if isinstance(S, tl.constexpr) else S):
            setattr(self, name, value)

    # Triton compiles no calls of functions that are neither compiled nor its own
    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
