"""Pictures of the command line: nothing lies over the data, units fit, two themes."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.text
import pytest

from ep_a2a.commands import plots
from ep_a2a.commands.bench.picture import plot_bench
from ep_a2a.commands.demo.view import plot_traffic
from ep_a2a.commands.plots import DARK, LIGHT, style_of
from ep_a2a.commands.trace import plot_timeline
from ep_a2a.errors import ConfigError
from ep_a2a.telemetry.spans import HOST, TraceSpan

ROWS = Path(__file__).resolve().parents[2] / "bench" / "results" / "2026-11-26_h100x4.jsonl"
NAMES = {"wire_limit": "reference_push", "world_size": "ranks", "num_tokens": "tokens", "max_num_tokens": "max_tokens"}
NAMES |= {"hidden_dim": "hidden", "num_experts": "experts", "quant_type": "quant"}
"""Of contenders and fields, by those of 2026-11-26."""
ROW = re.sub(r'"(\w+)"', lambda name: f'"{NAMES.get(name[1], name[1])}"', ROWS.read_text())
LINES = [json.loads(line) for line in ROW.splitlines()]
HEADER, BENCH = LINES[0], [line for line in LINES if line["record"] == "row" and "layer_us" not in line]
HEADLINE = {"quant": "fp8_per_1x128", "combine_quant": "none", "max_sms": 0, "gpus_per_node": 0}


def some_spans(us: int) -> list[TraceSpan]:
    start_ns = 5_000_000_000_000
    bars = (("dispatch", HOST, 0, 4), ("quant_and_put", 0, 1, 3), ("wait", 0, 3, 9), ("topk_reduce", 0, 9, 12))
    return [
        TraceSpan(name, "", "dispatch", 1, program, start_ns + begin * us * 1000, start_ns + end * us * 1000)
        for name, program, begin, end in bars
    ]


DEMO = {"backend": "ep_a2a", "tokens_per_rank": (96,), "topk": 4, "experts": 16}
DRAWN = {
    "traffic": lambda path: plot_traffic(DEMO | {"ranks": 2, "rows": [[9, 23], [2500, 0]]}, path),
    "traffic of many ranks": lambda path: plot_traffic(DEMO | {"ranks": 24, "rows": [[7] * 24] * 24}, path),
    "bench": lambda path: plot_bench([row for row in BENCH if HEADLINE.items() <= row.items()], path, HEADER),
    "bench, one size": lambda path: plot_bench([row for row in BENCH if row["tokens"] == 1], path, HEADER),
    "bench, everything": lambda path: plot_bench(BENCH, path, HEADER),
    "timeline": lambda path: plot_timeline({0: some_spans(1), 1: some_spans(2)}, path, "a note " * 30),
    "timeline of nothing": lambda path: plot_timeline({0: []}, path),
    "timeline on CPU": lambda path: plot_timeline({0: some_spans(100_000)}, path, device="cpu"),
}


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Draws a picture by its name and returns the figure, for light pages, which is not written."""

    def draw(name: str) -> Any:
        found = []

        def keep(path: Path, make: Any, *args: Any) -> tuple[Path, Path]:
            with mpl.rc_context(style_of(LIGHT)):
                found.append(make(LIGHT, *args))
                found[0].draw_without_rendering()
            return path, path

        monkeypatch.setattr(plots, "write", keep)
        DRAWN[name](tmp_path / "x.png")
        return found[0]

    return draw


def words_of(figure: Any) -> str:
    return " ".join("\n".join(text.get_text() for text in figure.findobj(mpl.text.Text)).split())


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_lies_over_the_data_or_is_cut(figure, name: str) -> None:
    drawn = figure(name)
    page = drawn.bbox.padded(1)
    around = [*drawn.texts, *drawn.findobj(mpl.legend.Legend)]
    for box in (*(each.get_window_extent() for each in around), *(axes.get_tightbbox() for axes in drawn.axes)):
        assert page.contains(*box.p0)
        assert page.contains(*box.p1)
    for axes, each in itertools.product(drawn.axes, around):
        assert not axes.bbox.overlaps(each.get_window_extent()), (axes, each)
    for one, other in itertools.combinations(around, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)


def test_every_line_of_a_bench_has_a_name_in_the_order_of_their_ends(figure) -> None:
    drawn = figure("bench, everything")
    ends = {line.get_label(): line.get_ydata()[-1] for line in drawn.axes[0].lines}
    texts = drawn.axes[0].get_legend().get_texts()
    assert [each.get_text() for each in texts] == sorted(ends, key=ends.get, reverse=True)
    assert len(ends) >= 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bench", "Both axes logarithmic"),
        ("bench", "H 7168"),
        ("bench", "4 x NVIDIA H100"),
        ("timeline", "µs since the first bar"),
        ("timeline on CPU", "s since the first bar"),
    ],
)
def test_words_say_what_is_seen(figure, name: str, said: str) -> None:
    assert said in words_of(figure(name))


def test_units() -> None:
    assert plots.unit_for(0.0, plots.TIME_UNITS) == (1e-3, "ns")
    assert plots.unit_for(999.0, plots.TIME_UNITS) == (1.0, "µs")
    assert plots.unit_for(1e3, plots.TIME_UNITS) == (1e3, "ms")
    assert plots.unit_for(7e12, plots.BYTE_UNITS) == (1e9, "GB")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_dark_variant_is_written_beside(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"traffic{suffix}"
    written = DRAWN["traffic"](path)
    assert written == (path, tmp_path / f"traffic.dark{suffix}")
    assert sorted(tmp_path.iterdir()) == sorted(written)
    light, dark = (each.read_bytes() for each in written)
    assert light != dark
    if suffix == ".svg":
        assert LIGHT.page.encode() in light
        assert DARK.page.encode() in dark
        DRAWN["traffic"](path)
        assert path.read_bytes() == light


def test_a_bench_without_times_draws_nothing(tmp_path: Path) -> None:
    plot_bench([row | {"status": "error"} for row in BENCH], tmp_path / "x.png", HEADER)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_written_are_found_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "x.dark.png").mkdir()
    with pytest.raises(ConfigError, match=r"x\.dark\.png"):
        plots.check_can_plot(tmp_path / "x.png")
    assert [each.name for each in tmp_path.iterdir()] == ["x.dark.png"]


def test_a_full_disk_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, target: Path) -> None:
        assert path.exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(ConfigError, match="No space left"):
        DRAWN["traffic"](tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
