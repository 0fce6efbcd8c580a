"""`mori.shmem`."""

from ep_a2a.compat.mori.shmem import api, tensor_utils
from ep_a2a.compat.mori.shmem.api import *  # noqa: F403
from ep_a2a.compat.mori.shmem.tensor_utils import *  # noqa: F403

__all__ = [*api.__all__, *tensor_utils.__all__]
