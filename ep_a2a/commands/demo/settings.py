"""Holds the sizes and choices of a demo run, equal in the command's process and on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ep_a2a import env
from ep_a2a.commands.options import check_topk
from ep_a2a.config import FP8_DTYPE, num_owned_experts
from ep_a2a.config.file import choose_backend, read_config_file
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import UnknownNameError
from ep_a2a.managers.registry import check_backend_name

SEED = 20240229
TOKEN_DTYPE = torch.bfloat16
"""Dtype of the model's activations: of dispatch's input and of the rows that combine sums."""
WAIT_SECS = 120.0
"""Bound of a wait for other ranks: the interpreter is slow, and ranks have different numbers of tokens."""


@dataclass(frozen=True)
class DemoSettings:
    """Sizes and choices of a run.

    Attributes:
        num_ranks: processes. device: "cpu" or "cuda".
        num_tokens: tokens over all ranks.
        hidden_dim, num_experts, topk: of the MoE layer.
        quant_type: cast inside dispatch: "none", "fp8_per_token" or "fp8_per_1x128".
        gpus_per_node: ranks of a virtual node; None goes by the machine.
        backend: name of the all-to-all backend. backend_reason: who chose it.
        seed: of the model's weights and the tokens' vectors.
    """

    num_ranks: int = 4
    device: str = "cpu"
    num_tokens: int = 96
    hidden_dim: int = 256
    num_experts: int = 16
    topk: int = 4
    quant_type: str = "none"
    gpus_per_node: int | None = None
    backend: str = "ep_a2a"
    backend_reason: str = "the default"
    seed: int = SEED

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Tokens of each rank, unequal on purpose: rank r brings about r + 1 shares."""
        ends = [self.num_tokens * r * (r + 1) // (self.num_ranks * (self.num_ranks + 1)) for r in range(self.num_ranks)]
        return tuple(end - start for start, end in zip(ends, [*ends[1:], self.num_tokens]))

    def handle_kwargs(self, rank: int) -> dict[str, Any]:
        """Returns the arguments of a rank for its manager's `get_handle`."""
        kwargs: dict[str, Any] = {
            "rank": rank,
            "num_ep_ranks": self.num_ranks,
            "input_dtype": TOKEN_DTYPE,
            "quant_dtype": TOKEN_DTYPE if self.quant_type == "none" else FP8_DTYPE,
            "token_hidden_size": self.hidden_dim,
            "max_num_tokens_per_dp_rank": max(self.tokens_per_rank),
            "num_local_experts": num_owned_experts(self.num_experts, self.num_ranks, rank),
            "num_experts": self.num_experts,
            "num_experts_per_token": self.topk,
            "quant_type": self.quant_type,
            "timeout_secs": WAIT_SECS,
        }
        return kwargs if self.gpus_per_node is None else kwargs | {"gpu_per_node": self.gpus_per_node}

    def check(self) -> None:
        """Checks the settings before processes are started.

        Raises:
            TopKError: topk exceeds the experts.
            ConfigError: a size that no op can have.
        """
        check_topk(self.topk, self.num_experts)
        config_from_handle_kwargs(self.handle_kwargs(0), topology_internode=False)


def choose_named_backend(option: str | None) -> tuple[str, str]:
    """Returns the name of the backend and who chose it, in the order of config.file.choose_backend."""
    name = choose_backend(option)
    try:
        check_backend_name(name)
    except UnknownNameError as error:
        error.field = f"--backend or {env.BACKEND.name}"
        raise
    path = env.CONFIG.get()
    if option:
        return name, "named by --backend"
    if path and read_config_file(path).all2all_backend:
        return name, f"named by {path} ({env.CONFIG.name})"
    return name, f"named by {env.BACKEND.name}" if env.BACKEND.get() else "the default"
