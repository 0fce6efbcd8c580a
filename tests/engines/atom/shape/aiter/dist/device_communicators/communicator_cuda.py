"""The shape of aiter.dist.device_communicators.communicator_cuda; see shape/README.md."""

from __future__ import annotations

from aiter.dist.device_communicators.base_device_communicator import DeviceCommunicatorBase


class CudaCommunicator(DeviceCommunicatorBase):
    _manager = None

    @property
    def all2all_manager(self):
        if self._manager is None and self.is_ep_communicator:
            from aiter.dist.device_communicators.all2all import MoriAll2AllManager

            self._manager = MoriAll2AllManager(self.cpu_group)
        return self._manager

    @all2all_manager.setter
    def all2all_manager(self, value):
        self._manager = value

    def destroy(self):
        if self._manager is not None:
            self._manager.destroy()
            self._manager = None
