"""The shape of aiter.dist.device_communicators.base_device_communicator; see shape/README.md."""

from __future__ import annotations

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
        from aiter.dist.parallel_state import get_dp_group, get_tp_group

        self.cpu_group = cpu_group
        self.rank = dist.get_rank(cpu_group)
        self.world_size = dist.get_world_size(cpu_group)
        self.dp_group, self.tp_group = get_dp_group(), get_tp_group()
        self.dp_rank, self.dp_world_size = self.dp_group.rank_in_group, self.dp_group.world_size
        self.internode = False

    def get_handle(self, kwargs, index=0):
        raise NotImplementedError

    def dispatch(self, hidden_states, router_logits, is_sequence_parallel=False):
        raise NotImplementedError

    def combine(self, hidden_states, is_sequence_parallel=False):
        raise NotImplementedError

    def set_num_sms(self, num_sms):
        pass

    def max_sms_used(self):
        return None

    def destroy(self):
        pass


class DeviceCommunicatorBase:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name=""):
        self.cpu_group = cpu_group
        self.device = device
        self.device_group = device_group
        self.is_ep_communicator = "ep" in unique_name
