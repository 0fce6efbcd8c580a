"""The names of `ep_a2a.compat.triton_distributed`, under Triton-distributed's own name for its low-latency layer."""

from ep_a2a.compat.triton_distributed import *  # noqa: F403
