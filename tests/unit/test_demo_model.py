"""The demo's model, its settings, and how its errors look."""

from pathlib import Path

import pytest
import torch

from ep_a2a.commands.demo import model as demo_model
from ep_a2a.commands.demo.model import embed, expert_weights
from ep_a2a.commands.demo.run import DemoSettings
from ep_a2a.commands.messages import show_error
from ep_a2a.commands.options import Quant, named_backend
from ep_a2a.commands.ranks import choose_device, default_ranks
from ep_a2a.config import DISPATCH_QUANT_TYPES
from ep_a2a.errors import ShapeError
from ep_a2a.reference import dense_moe, expert_mlp_rows

WORDS = ("to", "be", "or", "not", "to", "be")


def test_the_text_is_read_again_behind_its_end() -> None:
    num_words = len(demo_model.WORDS)
    assert demo_model.words_from(0, 4) == ("A", "router", "sends", "every")
    assert demo_model.words_from(num_words - 2, 3) == ("back", ".", "A")


def test_experts_equal_the_reference_on_received_rows() -> None:
    x = embed(WORDS, 0, 32)
    ids = torch.tensor([[0, 3], [1, 2], [2, 2], [-1, 1], [3, 9], [0, -5]], dtype=torch.int32)
    weights = torch.rand(6, 2)
    got = dense_moe(x.float(), weights, ids - 1, *expert_weights(range(1, 3), 32))
    expected = expert_mlp_rows(x.float(), ids, weights, *expert_weights(range(4), 32), 1, 2)
    torch.testing.assert_close(got, expected)
    assert not got[0].any()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 72])
@pytest.mark.parametrize("num_tokens", [1, 5, 96, 1000])
def test_tokens_are_split_unevenly(num_ranks: int, num_tokens: int) -> None:
    split = DemoSettings(ranks=num_ranks, tokens=num_tokens).tokens_per_rank
    assert (sum(split), len(split)) == (num_tokens, num_ranks)
    assert min(split) >= 0
    assert split[-1] == max(split)
    assert num_ranks == 1 or split[0] < split[-1]


@pytest.mark.parametrize(
    ("num_gpus", "asked", "device", "num_ranks"),
    [
        (8, "auto", "cuda", 4),
        (2, "cuda", "cuda", 2),
        (1, "auto", "cuda", 4),
        (2, "cpu", "cpu", 4),
        (0, "auto", "cpu", 4),
    ],
)
def test_device_and_ranks(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, asked: str, device: str, num_ranks: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose_device(asked) == device
    assert default_ranks(device, 4) == num_ranks


def test_who_named_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_backend(None) == ("ep_a2a", "the default")
    monkeypatch.setenv("EP_A2A_BACKEND", "naive")
    assert named_backend(None) == ("naive", "named by EP_A2A_BACKEND")
    path = tmp_path / "config.toml"
    path.write_text('all2all_backend = "allgather_reducescatter"')
    monkeypatch.setenv("EP_A2A_CONFIG", str(path))
    assert named_backend(None) == ("allgather_reducescatter", f"named by {path} (EP_A2A_CONFIG)")
    assert named_backend(None, str(path)) == ("allgather_reducescatter", f"named by {path}")
    assert named_backend("naive", str(path)) == ("naive", "named by --backend")


def test_casts_to_choose_from() -> None:
    assert {cast.value for cast in Quant} <= {kind.value for kind in DISPATCH_QUANT_TYPES}


def test_error_panel_shows_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ShapeError("x of shape [T, H]", "[bold]"))
    panel = capsys.readouterr().err
    assert "[T, H]" in panel
    assert "[bold]" in panel
    assert "nothing was launched" in panel
    assert "docs/errors.md#shapeerror" in panel
