"""Numbers that host and device code name alike."""

import enum


class DeviceEnum(enum.IntEnum):
    """Numbers that device code names as the host does."""

    # Triton lets device code name globals that are compile-time constants, or its own
    __triton_builtin__ = True
