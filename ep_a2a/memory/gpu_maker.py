"""Whose GPUs this process has, and the refusal of those on which this package's kernels have never run."""

from __future__ import annotations

import torch

from ep_a2a.errors import UnsupportedError

NVIDIA, AMD = "NVIDIA", "AMD"


def gpu_maker() -> str:
    """Returns the maker of the GPUs that this torch is built for."""
    return AMD if torch.version.hip else NVIDIA


def refuse_other_gpus(device_type: str) -> None:
    """Raises UnsupportedError where own kernels would have to run on a GPU that is not NVIDIA's.

    Args:
        device_type: of the op's tensors: "cuda", also on AMD GPUs, or "cpu".
    """
    if device_type == "cuda" and gpu_maker() != NVIDIA:
        raise UnsupportedError(
            "an NVIDIA GPU: for AMD GPUs the kernels of ep_a2a are compiled (gfx942, gfx950), and have never run",
            found_gpu(),
            "Use the backend allgather_reducescatter (EP_A2A_BACKEND=allgather_reducescatter), or mori where MORI is "
            "installed.",
        )


def found_gpu() -> str:
    """Returns the current GPU's name with its maker."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU that torch can use"
    return f"{name}, on {gpu_maker()}'s build of torch"
