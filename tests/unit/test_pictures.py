"""Pictures of the command line: nothing lies over the data, what was not measured is grey, units fit, two themes."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.text
import pytest

from ep_a2a.commands import plots
from ep_a2a.commands.bench.picture import plot_bench
from ep_a2a.commands.demo.view import plot_traffic
from ep_a2a.commands.doctor.selftest import SelfTest, plot_rates
from ep_a2a.commands.doctor.selftest_rank import PairResult
from ep_a2a.commands.plan.nodes import plot_predictions, predictions
from ep_a2a.commands.plots import DARK, LIGHT, THEMES, Caption, Panel, Theme, style_of
from ep_a2a.commands.simulation.traffic import Shape
from ep_a2a.commands.trace import plot_timeline
from ep_a2a.errors import ConfigError
from ep_a2a.telemetry.spans import HOST, TraceSpan
from ep_a2a.topology.gpu_share import sharing_note

PROJECT = Path(__file__).resolve().parents[2]

GPUS = {"device": "cuda", "gpus": ["NVIDIA H200"] * 4, "ep_a2a": "0.1.0", "commit": "648c52e"}
CPU = {"device": "cpu", "ep_a2a": "0.1.0", "commit": None}


def bench_rows() -> list[dict[str, Any]]:
    """Measured rows, in which the reference push has its former name."""
    text = (PROJECT / "bench" / "results" / "2026-11-22_h200x4.jsonl").read_text()
    lines = text.replace('"wire_limit"', '"reference_push"').splitlines()
    return [row for row in map(json.loads, lines) if row["record"] == "row"]


def some_spans(us: int) -> list[TraceSpan]:
    start_ns = 5_000_000_000_000
    bars = (("dispatch", HOST, 0, 4), ("quant_and_put", 0, 1, 3), ("wait", 0, 3, 9), ("topk_reduce", 0, 9, 12))
    return [
        TraceSpan(name, "", "dispatch", 1, program, start_ns + begin * us * 1000, start_ns + end * us * 1000)
        for name, program, begin, end in bars
    ]


def self_test(device: str, num_ranks: int) -> SelfTest:
    pairs = {pair: PairResult((120.0, 98.5), 1, 1) for pair in itertools.combinations(range(num_ranks), 2)}
    return SelfTest(device, num_ranks, pairs | {(0, 1): PairResult(error="RankTimeoutError: late")})


HEADLINE = {"quant_type": "fp8_per_1x128", "combine_quant": "none", "max_sms": 0, "gpus_per_node": 0}
DEMO = {"backend": "ep_a2a", "tokens_per_rank": (96,), "topk": 4, "experts": 16}
DRAWN = {
    "traffic": lambda path: plot_traffic(DEMO | {"ranks": 2, "rows": [[9, 23], [2500, 0]]}, path),
    "traffic of many ranks": lambda path: plot_traffic(DEMO | {"ranks": 24, "rows": [[7] * 24] * 24}, path),
    "bench": lambda path: plot_bench([row for row in bench_rows() if HEADLINE.items() <= row.items()], path, GPUS),
    "bench, one size": lambda path: plot_bench([row for row in bench_rows() if row["num_tokens"] == 1], path, GPUS),
    "bench, nothing": lambda path: plot_bench([], path, GPUS),
    "bench, everything": lambda path: plot_bench(bench_rows(), path, GPUS),
    "bench on CPU": lambda path: plot_bench([row | {"device": "cpu"} for row in bench_rows()], path, CPU),
    "timeline": lambda path: plot_timeline({0: some_spans(1), 1: some_spans(2)}, path, "a note " * 30),
    "timeline of nothing": lambda path: plot_timeline({0: []}, path),
    "timeline on CPU": lambda path: plot_timeline({0: some_spans(100_000)}, path, device="cpu"),
    "rates": lambda path: plot_rates(self_test("cuda", 8), path),
    "rates on a shared GPU": lambda path: plot_rates(replace(self_test("cuda", 3), note=sharing_note(3, 1)), path),
    "rates of two": lambda path: plot_rates(self_test("cuda", 2), path),
    "rates of one": lambda path: plot_rates(SelfTest("cuda", 1, {}), path),
    "rates on CPU": lambda path: plot_rates(self_test("cpu", 3), path),
    "one number of nodes": lambda path: plot_predictions(predictions((2,), Shape(32, 512, casts=False)), path),
    "nodes": lambda path: plot_predictions(predictions((2, 4), Shape(32, 512, casts=False)), path),
}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Draws by the name of a picture, and returns figures that are not written. Themes differ in colours only."""

    def draw(name: str, themes: tuple[Theme, ...] = (LIGHT,)) -> list[Any]:
        found = []

        def keep(path: Path, make: Any, *args: Any) -> tuple[Path, Path]:
            for theme in themes:
                with mpl.rc_context(style_of(theme)):
                    figure = make(theme, *args)
                    figure.draw_without_rendering()
                    found.append(figure)
            return path, path

        monkeypatch.setattr(plots, "write", keep)
        DRAWN[name](tmp_path / "x.png")
        return found

    return draw


def words_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text()]


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_lies_over_the_data_or_is_cut(figures, name: str) -> None:
    for figure in figures(name):
        page = figure.bbox.padded(1)
        for each in (*figure.texts, *figure.findobj(mpl.legend.Legend)):
            box = each.get_window_extent()
            assert page.contains(*box.p0), each
            assert page.contains(*box.p1), each
            assert not [axes for axes in figure.axes if axes.bbox.overlaps(box)], each
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert page.contains(*box.p0), axes
            assert page.contains(*box.p1), axes
            assert not [text for text in figure.texts if text.get_window_extent().overlaps(box)], axes


@pytest.mark.parametrize("name", ["bench", "bench, everything"])
def test_every_line_has_a_name_in_the_order_of_their_ends(figures, name: str) -> None:
    (axes,) = figures(name)[0].axes
    ends = {line.get_label(): line.get_ydata()[-1] for line in axes.lines}
    texts = axes.get_legend().get_texts()
    assert [each.get_text() for each in texts] == sorted(ends, key=ends.get, reverse=True)
    boxes = [each.get_window_extent() for each in texts]
    assert len(boxes) == len(axes.lines) >= 4
    assert not [1 for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


def test_rates_of_a_shared_gpu_say_so(figures) -> None:
    assert any(sharing_note(3, 1) in text for text in words_of(figures("rates on a shared GPU")[0]))


def test_what_was_not_measured_is_grey(figures) -> None:
    for theme, figure in zip(THEMES, figures("rates", THEMES)):
        image = figure.axes[0].images[0]
        colours = image.to_rgba(image.get_array())
        grey = mpl.colors.to_rgba(theme.unmeasured)
        for source, destination in itertools.product(range(8), repeat=2):
            unmeasured = source == destination or {source, destination} == {0, 1}
            assert (tuple(colours[source, destination]) == grey) == unmeasured
        words = [" ".join(text.split()) for text in words_of(figure)]
        assert "Rates of pushes between ranks: 98.5 to 120 GB/s" in words
        assert any("failed: 0 and 1" in text for text in words)


def test_cpu_pictures_tell_nothing_about_speed(figures) -> None:
    for name in ("bench on CPU", "rates on CPU"):
        text = "\n".join(words_of(figures(name)[0]))
        assert "Functional check" in text
        assert "nothing about speed" in text
        assert "ok" in text
        assert not [word for word in ("µs", "GB/s", "nccl") if word in text]
    assert "failed" in words_of(figures("rates on CPU")[0])


def test_a_wrong_result_counts_for_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    monkeypatch.setattr(plots, "write", lambda path, draw, rows, labels, words: found.update(rows=rows, words=words))
    rows = [row for row in bench_rows() if row["num_tokens"] in (1, 16) and row["quant_type"] == "fp8_per_1x128"]
    rows += [rows[-1] | {"status": "error"}, rows[0] | {"contender": "deepep", "status": "unavailable"}]
    plot_bench(rows, tmp_path / "x.png", CPU)
    assert found["rows"]["deepep"] == {"1": None}
    assert {"1": True, "16": True} in found["rows"].values()
    assert [row for row in found["rows"].values() if row.get("16") is False]
    num_rows = len(found["rows"])
    assert found["words"].title == f"Functional check: {num_rows - 2} of {num_rows - 1} contenders are right"


@pytest.mark.parametrize(("name", "unit", "most"), [("timeline", "µs", 24), ("timeline on CPU", "s", 1.2)])
def test_a_timeline_has_the_unit_of_its_length(figures, name: str, unit: str, most: float) -> None:
    (axes,) = figures(name)[0].axes
    assert axes.get_xlabel() == f"{unit} since the first bar"
    assert axes.get_xlim()[0] == 0
    assert most <= axes.get_xlim()[1] < 1.2 * most
    assert axes.xaxis.get_major_formatter().get_offset() == ""


def test_units() -> None:
    assert plots.unit_for(0.0, plots.TIME_UNITS) == (1e-3, "ns")
    assert plots.unit_for(999.0, plots.TIME_UNITS) == (1.0, "µs")
    assert plots.unit_for(1e3, plots.TIME_UNITS) == (1e3, "ms")
    assert plots.unit_for(7e12, plots.BYTE_UNITS) == (1e9, "GB")


def test_titles_say_what_is_seen_and_footers_hold_parameters(figures) -> None:
    title, footer = (text.get_text() for text in figures("bench")[0].texts)
    assert " ".join(title.split()) == "Round trip: ep_a2a takes 1.02 to 1.21 times the reference push"
    assert footer.startswith("Both axes logarithmic")
    assert "H 7168" in footer
    assert "4 x NVIDIA H200 · ep_a2a 0.1.0 (648c52e), ep-a2a bench" in footer
    assert figures("bench, everything")[0].texts[0].get_text() == "Round trip of dispatch and combine"
    nodes = figures("nodes")[0]
    assert nodes.axes[0].get_ylabel() == "time (µs)"
    assert nodes.texts[0].get_text().startswith("Predicted, not measured")


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


def test_ticks_do_not_touch() -> None:
    panel = Panel("x", "y", {n: str(n) for n in range(1, 65)}, log_y=True, lines=[("one", [(1, 2.0), (64, 3.0)], {})])
    with mpl.rc_context(style_of(LIGHT)):
        figure = plots.lines(LIGHT, [panel], Caption("title"))
    figure.draw_without_rendering()
    boxes = [each.get_window_extent() for each in figure.axes[0].get_xticklabels() if each.get_text()]
    assert len(boxes) > 8
    assert not [1 for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
