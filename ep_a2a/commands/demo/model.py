"""Defines the demo's MoE layer in plain torch: text, hashed embedding, softmax top-k router, SwiGLU experts.

Nothing is trained. Seeds determine all weights, so each process makes its own part alone.
"""

import hashlib
import math
import re

import torch

from ep_a2a.routing import softmax_topk

SEED = 20240229
INTERMEDIATE_DIM = 128
"""Rows of an expert's gate projection; small, since the demo is about the exchange."""
POSITION_SHARE = 0.5
"""Magnitude of a token's position relative to its word: equal words go to different experts, but not at random."""
ROUTER_SHARPNESS = 2.0
"""Standard deviation of router logits; at 0 all experts are alike, and high values leave one."""

TEXT = (
    "A router sends every token to a few experts. The experts of a layer lie on many ranks, so tokens travel: dispatch "
    "brings each of them to the ranks of its experts, and combine brings the results back and adds them up. A rank "
    "that owns two experts of a token gets it once; it adds the two results before they travel: one row comes back."
)
WORDS = re.findall(r"\w+|[^\w\s]", TEXT)
"""Words and marks: the tokens. The text is read again from its start where there are more."""


def words_from(position: int, num_tokens: int) -> tuple[str, ...]:
    """Returns the words of so many tokens, from a position on."""
    return tuple(WORDS[place % len(WORDS)] for place in range(position, position + num_tokens))


def embed(tokens: tuple[str, ...], first_position: int, hidden_dim: int, seed: int = SEED) -> torch.Tensor:
    """Embeds tokens at positions `first_position`, `first_position + 1`, ...: bfloat16 `[T, H]`, rows of unit RMS."""
    rows = torch.empty(len(tokens), hidden_dim)
    for row, (position, token) in zip(rows, enumerate(tokens, first_position)):
        word = torch.randn(hidden_dim, generator=_generator(f"word {token}", seed))
        row.copy_(word).add_(_position_vector(position, hidden_dim), alpha=POSITION_SHARE)
    rms = rows.square().mean(dim=1, keepdim=True).sqrt()
    return (rows / rms).to(torch.bfloat16)


def _position_vector(position: int, hidden_dim: int) -> torch.Tensor:
    """Sinusoids of geometrically growing wavelengths (Vaswani et al. 2017), of unit RMS."""
    channel = torch.arange(hidden_dim)
    angle = position * 10000.0 ** (-2.0 * (channel // 2) / hidden_dim)
    return math.sqrt(2.0) * torch.where(channel % 2 == 0, angle.sin(), angle.cos())


def route(x: torch.Tensor, num_experts: int, topk: int, seed: int = SEED) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights float32 `[T, K]` and expert ids int32 `[T, K]` for tokens `[T, H]`."""
    hidden_dim = x.shape[1]
    router = (
        torch.randn(num_experts, hidden_dim, generator=_generator("router", seed)) * ROUTER_SHARPNESS / hidden_dim**0.5
    )
    return softmax_topk(x.to(torch.float32) @ router.to(x.device).T, topk)


def expert_weights(experts: range, hidden_dim: int, seed: int = SEED) -> tuple[torch.Tensor, torch.Tensor]:
    """Projections of some experts, bfloat16: gate and up `[E, 2F, H]`, down `[E, H, F]`."""
    gate_up = torch.empty(len(experts), 2 * INTERMEDIATE_DIM, hidden_dim, dtype=torch.bfloat16)
    down = torch.empty(len(experts), hidden_dim, INTERMEDIATE_DIM, dtype=torch.bfloat16)
    for number, expert in enumerate(experts):
        generator = _generator(f"expert {expert}", seed)
        gate_up[number] = torch.randn(gate_up.shape[1:], generator=generator) / hidden_dim**0.5
        down[number] = torch.randn(down.shape[1:], generator=generator) / INTERMEDIATE_DIM**0.5
    return gate_up, down


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
