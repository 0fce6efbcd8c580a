"""Pictures of the command line: nothing lies over the data, and units fit."""

import itertools
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.text
import pytest

from ep_a2a.commands import plots
from ep_a2a.commands.bench.picture import plot_bench
from ep_a2a.commands.bench.runner import Status, make_record
from ep_a2a.commands.demo.view import plot_traffic
from ep_a2a.commands.measure.workload import make_workloads
from ep_a2a.commands.trace import plot_timeline
from ep_a2a.telemetry.spans import HOST, TraceSpan

HEADER = {"gpus": ["NVIDIA H100"] * 4, "ep_a2a": "1.0", "commit": "0123456789"}
CONTENDERS = ("reference_push", "ep_a2a", "nccl_agrs", "flashinfer", "deepep")


def some_rows(**values: Any) -> list[dict[str, Any]]:
    """Rows at 1 to 4096 tokens; contenders take 10 µs, 20 µs and so on, and a bit for each token."""
    points = make_workloads({"ranks": (4,), "tokens": (1, 32, 128, 512, 4096)} | values)
    return [
        make_record(point, "cuda", name, Status.OK) | {"round_trip_us": 10.0 * place + 0.1 * point.tokens}
        for point in points
        for place, name in enumerate(CONTENDERS, 1)
    ]


def some_spans(us: int) -> list[TraceSpan]:
    start_ns = 5_000_000_000_000
    bars = (("dispatch", HOST, 0, 4), ("quant_and_put", 0, 1, 3), ("wait", 0, 3, 9), ("topk_reduce", 0, 9, 12))
    return [
        TraceSpan(name, "", "dispatch", 1, program, start_ns + begin * us * 1000, start_ns + end * us * 1000)
        for name, program, begin, end in bars
    ]


EVERYTHING = {"quant": ("none", "fp8_per_1x128"), "layout": ("compact", "rank_major")}
DEMO = {"backend": "ep_a2a", "tokens_per_rank": (96,), "topk": 4, "experts": 16}
DRAWN = {
    "traffic": lambda path: plot_traffic(DEMO | {"ranks": 2, "rows": [[9, 23], [2500, 0]]}, path),
    "traffic of many ranks": lambda path: plot_traffic(DEMO | {"ranks": 24, "rows": [[7] * 24] * 24}, path),
    "bench": lambda path: plot_bench(some_rows(), path, HEADER),
    "bench, one size": lambda path: plot_bench(some_rows(tokens=(1,), max_sms=(0, 8, 24)), path, HEADER),
    "bench, everything": lambda path: plot_bench(some_rows(**EVERYTHING), path, HEADER),
    "timeline": lambda path: plot_timeline({0: some_spans(1), 1: some_spans(2)}, path, "a note " * 30),
    "timeline of nothing": lambda path: plot_timeline({0: []}, path),
    "timeline on CPU": lambda path: plot_timeline({0: some_spans(100_000)}, path, device="cpu"),
}


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Draws a picture by its name and returns the figure, which is not written."""

    def draw(name: str) -> Any:
        found = []

        def keep(path: Path, make: Any, *args: Any) -> None:
            with mpl.rc_context(plots.STYLE):
                found.append(make(*args))
                found[0].draw_without_rendering()

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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bench", "Both axes logarithmic"),
        ("bench", "hidden 7168"),
        ("bench", "4 x NVIDIA H100"),
        ("bench, one size", "bound on multiprocessors"),
        ("bench, one size", "tokens 1, "),
        ("timeline", "µs since the first bar"),
        ("timeline on CPU", "s since the first bar"),
    ],
)
def test_words_say_what_is_seen(figure, name: str, said: str) -> None:
    assert said in words_of(figure(name))


def test_lines_are_named_by_contender_and_what_varies_in_the_order_of_their_ends(figure) -> None:
    texts = [text.get_text() for text in figure("bench, everything").axes[0].get_legend().get_texts()]
    assert texts[0] == "deepep, quant none, layout compact"
    assert [text.split(",")[0] for text in texts] == [name for name in reversed(CONTENDERS) for _ in range(4)]


def test_no_bound_is_drawn_behind_all_others(figure) -> None:
    axes = figure("bench, one size").axes[0]
    places = {text.get_text(): text.get_position()[0] for text in axes.get_xticklabels()}
    assert places == {"8": 8, "24": 24, "all": 48}
    assert all(list(line.get_xdata()) == [8, 24, 48] for line in axes.lines)


def test_units() -> None:
    assert plots.unit_for(0.0, plots.TIME_UNITS) == (1e-3, "ns")
    assert plots.unit_for(999.0, plots.TIME_UNITS) == (1.0, "µs")
    assert plots.unit_for(1e3, plots.TIME_UNITS) == (1e3, "ms")
    assert plots.unit_for(7e12, plots.TIME_UNITS) == (1e6, "s")


def test_a_bench_without_times_draws_nothing(tmp_path: Path) -> None:
    plot_bench([row | {"status": "error"} for row in some_rows()], tmp_path / "x.png", HEADER)
    assert not list(tmp_path.iterdir())


def test_equal_pictures_are_equal_files(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        DRAWN["traffic"](tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
