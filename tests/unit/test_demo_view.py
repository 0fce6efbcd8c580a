"""The demo's report on a terminal, from a report that is made up."""

import io
from typing import Any

from rich.console import Console

from ep_a2a.commands.demo.view import show_report
from tests.cases.tables import read_table


def report_of(**changes: Any) -> dict[str, Any]:
    return read_table("demo_report") | changes


def printed(report: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_report(console, report, verbose=False)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_first_sentence_says_what_is_wrong() -> None:
    text = printed(report_of(matches=False), 200)
    assert text.partition("\n")[0].endswith("and the output DOES NOT MATCH the dense layer.")
    comparison = report_of()["comparison"] | {"rows_as_routed": False}
    assert "ranks did not receive the rows" in printed(report_of(matches=False, comparison=comparison), 200)


def test_the_traffic_is_a_picture_of_shades() -> None:
    lines = [line.split() for line in printed(report_of()).splitlines()]
    assert ["0", "3", "▒", "4", "▓", "4", "3"] in lines
    assert ["1", "0", "8", "█", "0", "12"] in lines
    assert "50% fewer rows than with a copy for each expert" in printed(report_of(), 200)


def test_many_ranks_fit_into_eighty_columns() -> None:
    rows = [[1000] * 64 for _ in range(64)]
    text = printed(report_of(rows=rows, ranks=64, tokens_per_rank=(1,) * 64))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert ["63", "1000", "63000", "64000"] in [line.split() for line in text.splitlines()]


def test_shared_gpus_are_mentioned() -> None:
    note = "8 ranks share 1 GPU: times are not those of NVLink"
    text = printed(report_of(device="cuda", ranks=8, note=note), 200)
    assert "on 8 ranks that share GPUs, and" in text
    assert note in text
