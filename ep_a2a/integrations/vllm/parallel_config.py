"""The parallel configuration of a user who chose this backend.

Its class is what activates the rest: vLLM sends the configuration to its processes by pickle, and to unpickle this
class is to import this module there. So there is no environment variable, and nothing happens to other users.
"""

from __future__ import annotations

from typing import Any

from vllm.config.parallel import ParallelConfig

from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.common import BACKEND_NAME
from ep_a2a.integrations.vllm.engine_error import patch_engine
from ep_a2a.integrations.vllm.patches import activate


class EpA2AParallelConfig(ParallelConfig):  # type: ignore[misc]
    """vLLM's ParallelConfig with all2all_backend "ep_a2a"."""

    @property
    def use_sequence_parallel_moe(self) -> bool:
        """As for the backends on vLLM's own list: tensor-parallel ranks bring distinct tokens, not copies."""
        if self.all2all_backend != BACKEND_NAME:
            return bool(super().use_sequence_parallel_moe)
        return bool(self.enable_expert_parallel and self.tensor_parallel_size > 1 and self.data_parallel_size > 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        activate()
        # this may be the process of an engine, or of a client that was given a configuration made elsewhere
        patch_engine()


def choose(config: ParallelConfig) -> None:
    """Makes a ParallelConfig with our backend's name one that activates it, in this process and where it is sent to.

    Raises:
        UnsupportedError: this vLLM is too old.
    """
    support.check_version()
    config.__class__ = EpA2AParallelConfig
    activate()
