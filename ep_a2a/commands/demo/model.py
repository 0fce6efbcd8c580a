"""Defines the demo's MoE layer in plain torch: text, hashed embedding, softmax top-k router, SwiGLU experts.

Nothing is trained. Seeds determine all weights, so each process makes its own part alone.
"""

import hashlib
import importlib.metadata
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ep_a2a.errors import ConfigError
from ep_a2a.routing import softmax_topk
from ep_a2a.whole_files import read_file

SEED = 20240229
INTERMEDIATE_DIM = 128
"""Rows of an expert's gate projection; small, since the demo is about the exchange."""
POSITION_SHARE = 0.5
"""Magnitude of a token's position relative to its word: equal words go to different experts, but not at random."""
ROUTER_SHARPNESS = 2.0
"""Standard deviation of router logits; at 0 all experts are alike, and high values leave one."""

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class DemoText:
    """The tokens that go through the layer.

    Attributes:
        source: where the text comes from.
        tokens: words and punctuation marks, as many as asked for.
        num_available: how many the text has; with fewer than asked for it is read again from its start.
    """

    source: str
    tokens: tuple[str, ...]
    num_available: int


def read_text(path: Path | None, num_tokens: int) -> DemoText:
    """Reads the first `num_tokens` words and marks of a file, or of this project's README.

    Raises:
        ConfigError: the text cannot be read or has no words.
    """
    source, text = _default_text() if path is None else (str(path), _read(path))
    words = _WORD_OR_MARK.findall(text)
    if not words:
        raise ConfigError("a text with words", f"none in {source}", "Pass --text with another file.")
    return DemoText(source, tuple(itertools.islice(itertools.cycle(words), num_tokens)), len(words))


def _read(path: Path) -> str:
    return read_file(path, "a text file in UTF-8", "Pass --text with another file.", str)


def _default_text() -> tuple[str, str]:
    root = Path(__file__).resolve().parents[3]
    # Beside an installed package, README.md alone could be another project's.
    if (root / "pyproject.toml").is_file() and (root / "README.md").is_file():
        return "README.md", _read(root / "README.md")
    try:
        metadata = importlib.metadata.metadata("ep-a2a")
    except importlib.metadata.PackageNotFoundError:
        metadata = None
    if metadata is None or "Description" not in metadata:
        raise ConfigError("this project's README", "neither a checkout nor an installed package", "Pass --text FILE.")
    return "the README in the package's metadata", metadata["Description"]


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
