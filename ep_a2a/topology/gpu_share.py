"""How ranks are spread over GPUs where there are more ranks than GPUs."""


def gpu_of(local_rank: int, num_gpus: int) -> int:
    """Returns the index of the GPU that a host's rank uses: ranks take the GPUs in turn."""
    return local_rank % num_gpus


def ranks_per_gpu(num_ranks: int, num_gpus: int) -> int:
    """Returns the most ranks that use one GPU; 0 without GPUs."""
    return -(-num_ranks // num_gpus) if num_gpus else 0


def sharing_note(num_ranks: int, num_gpus: int) -> str:
    """Returns a warning for readers of times where ranks share GPUs; "" where each has its own."""
    if ranks_per_gpu(num_ranks, num_gpus) < 2:
        return ""
    return f"{num_ranks} ranks share {num_gpus} GPU{'s' if num_gpus > 1 else ''}: times are not those of NVLink"
