"""The demo's model, its settings, and how its errors look."""

import sys
from pathlib import Path

import pytest
import torch

from ep_a2a.commands import plots as plot
from ep_a2a.commands.demo import model as demo_model
from ep_a2a.commands.demo.model import embed, expert_weights, read_text, route
from ep_a2a.commands.demo.run import TOKEN_DTYPE, DemoSettings
from ep_a2a.commands.messages import show_error
from ep_a2a.commands.options import Quant, named_backend
from ep_a2a.commands.ranks import choose_device, default_ranks
from ep_a2a.config import DISPATCH_QUANT_TYPES
from ep_a2a.errors import ConfigError, MissingPackageError, ShapeError, TopKError, UnsupportedError
from ep_a2a.reference import dense_moe, expert_mlp_rows

WORDS = ("to", "be", "or", "not", "to", "be")


def test_text_is_cut_into_words_and_marks_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Don't — 3 times.", encoding="utf-8")
    text = read_text(path, 9)
    assert text.tokens == ("Don", "'", "t", "—", "3", "times", ".", "Don", "'")
    assert (text.num_available, text.source) == (7, str(path))


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\x00"])
def test_text_that_cannot_be_used(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        read_text(path, 4)


def test_default_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "ep_a2a" / "commands" / "demo" / "model.py"
    monkeypatch.setattr(demo_model, "__file__", str(module))
    (tmp_path / "README.md").write_text("another package's")

    monkeypatch.setattr("importlib.metadata.metadata", lambda _: {"Description": "of the package"})
    assert read_text(None, 3).tokens == ("of", "the", "package")
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: {})
    with pytest.raises(ConfigError, match="Pass --text"):
        read_text(None, 3)
    (tmp_path / "pyproject.toml").touch()
    assert read_text(None, 2).tokens == ("another", "package")


def test_embedding_knows_words_and_positions() -> None:
    x = embed(WORDS, 0, 64)
    assert x.dtype == torch.bfloat16
    assert torch.equal(x[2:], embed(WORDS[2:], 2, 64))
    assert not torch.equal(x[0], x[4])
    assert torch.allclose(x.float().square().mean(1), torch.ones(6), atol=0.02)
    similarity = torch.nn.functional.cosine_similarity(x[0].float(), x.float(), dim=1)
    assert similarity[4] > similarity[[1, 2, 3, 5]].max()


def test_routing_uses_many_experts() -> None:
    weights, ids = route(embed(tuple(f"word{n}" for n in range(64)), 0, 64), 16, 4)
    assert ids.dtype == torch.int32
    assert ids.unique().numel() >= 12
    assert bool((weights.sum(1) < 1).all())


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
    split = DemoSettings(num_ranks=num_ranks, num_tokens=num_tokens).tokens_per_rank
    assert (sum(split), len(split)) == (num_tokens, num_ranks)
    assert min(split) >= 0
    assert split[-1] == max(split)
    assert num_ranks == 1 or split[0] < split[-1]


def test_settings_are_checked_before_anything_starts() -> None:
    DemoSettings().check()
    with pytest.raises(TopKError):
        DemoSettings(topk=17).check()
    with pytest.raises(ConfigError):
        DemoSettings(hidden_dim=12).check()


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(asked) for asked in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == "cpu"
    with pytest.raises(UnsupportedError):
        choose_device("cuda")


def test_ranks_that_a_command_starts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus, device, num_ranks in ((8, "cuda", 4), (2, "cuda", 2), (1, "cuda", 4), (2, "cpu", 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
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


def test_handle_kwargs_of_uneven_experts() -> None:
    settings = DemoSettings(num_experts=6, gpus_per_node=2)
    assert [settings.handle_kwargs(rank)["num_local_experts"] for rank in range(4)] == [2, 2, 1, 1]
    assert settings.handle_kwargs(0)["gpu_per_node"] == 2
    assert settings.handle_kwargs(0)["quant_dtype"] == TOKEN_DTYPE


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        plot.check_can_plot(tmp_path / "no folder" / "traffic.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install matplotlib"):
        plot.check_can_plot(tmp_path / "traffic.png")


def test_error_panel_shows_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ShapeError("x of shape [T, H]", "[bold]"))
    panel = capsys.readouterr().err
    assert "[T, H]" in panel
    assert "[bold]" in panel
    assert "nothing was launched" in panel
    assert "docs/errors.md#shapeerror" in panel
