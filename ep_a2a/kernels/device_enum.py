"""Numbers that host and device code name alike.

Triton lets device code name globals that are compile-time constants, or its own.
"""

import enum


class DeviceNumber(int):
    """A number that device code names as the host does."""

    __triton_builtin__ = True


class DeviceEnum(enum.IntEnum):
    """Numbers that device code names as the host does."""

    __triton_builtin__ = True
