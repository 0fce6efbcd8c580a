"""Whose GPUs this process has, and which ranks use the same one: by UUID, since indices differ between processes."""

from pathlib import Path

import torch

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.memory.rendezvous import Rendezvous

NVIDIA, AMD = "NVIDIA", "AMD"
PIPE_VARIABLE, DEFAULT_PIPE = "CUDA_MPS_PIPE_DIRECTORY", Path("/tmp/nvidia-mps")
"""Where an MPS daemon listens."""


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


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a CUDA device, equal in all processes; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def ranks_by_gpu(rendezvous: Rendezvous, device: torch.device) -> dict[str, tuple[int, ...]]:
    """The ranks that use each GPU, by its UUID; empty on CPU. Collective; equal on all ranks."""
    found: dict[str, tuple[int, ...]] = {}
    if device.type == "cpu":
        return found
    for rank, uuid in enumerate(rendezvous.exchange("GPU of each rank", gpu_uuid(device))):
        found[uuid] = (*found.get(uuid, ()), rank)
    return found


def require_own_gpus(rendezvous: Rendezvous, device: torch.device) -> None:
    """Raise on all ranks if NCCL would refuse the group. Collective.

    Raises:
        UnsupportedError: several ranks use one GPU.
    """
    shared = [ranks for ranks in ranks_by_gpu(rendezvous, device).values() if len(ranks) > 1]
    if shared:
        together = "; ".join(f"ranks {', '.join(map(str, ranks))} use one" for ranks in shared)
        raise UnsupportedError(
            "a GPU for each rank, which NCCL needs",
            together,
            "Use the backend 'ep_a2a', whose kernels need no NCCL, or start a rank for each GPU.",
        )


def refuse_masks_under_mps() -> None:
    """Raises UnsupportedError where processes that share a GPU do so through an MPS daemon."""
    pipe = Path(env.other_variable(PIPE_VARIABLE) or DEFAULT_PIPE)
    if (pipe / "control").exists():
        raise UnsupportedError(
            "on_rank_loss='mask' with a GPU for each rank, or without MPS",
            f"ranks that share a GPU through the MPS daemon in {pipe}, where a death can end the others' contexts",
            "Use on_rank_loss='fail', or end the MPS daemon.",
        )
