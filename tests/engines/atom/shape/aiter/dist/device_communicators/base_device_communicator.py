"""The shape of aiter.dist.device_communicators.base_device_communicator; see shape/README.md."""

from weakref import WeakValueDictionary

import torch.distributed as dist


class Cache:
    def __init__(self):
        self._handles = WeakValueDictionary()

    def get_or_create(self, kwargs, func, index=0):
        key = (tuple(sorted(kwargs.items())), index)
        handle = self._handles.get(key)
        if handle is None:
            handle = self._handles[key] = func(**kwargs)
        return handle


class All2AllManagerBase:
    rank: int
    world_size: int

    def __init__(self, cpu_group):
        self.cpu_group = cpu_group
        self.rank = dist.get_rank(cpu_group)
        self.world_size = dist.get_world_size(cpu_group)

    def destroy(self):
        pass


class DeviceCommunicatorBase:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name=""):
        self.cpu_group = cpu_group
        self.device = device
        self.device_group = device_group
        self.is_ep_communicator = "ep" in unique_name
