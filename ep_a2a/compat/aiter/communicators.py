"""AITER's communicators by their names (`base_device_communicator` and `communicator_cuda`)."""

from ep_a2a.compat.aiter.managers import AiterAll2AllManager
from ep_a2a.managers.base import All2AllManagerBase, Cache
from ep_a2a.parallel.communicator import DeviceCommunicator as DeviceCommunicatorBase

__all__ = ["All2AllManagerBase", "Cache", "CudaCommunicator", "DeviceCommunicatorBase"]


class CudaCommunicator(DeviceCommunicatorBase):
    """AITER's communicator: handles of its manager have MORI's interface, as AITER's have."""

    manager_interface = AiterAll2AllManager
