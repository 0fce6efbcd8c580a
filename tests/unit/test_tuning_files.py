"""Files of tuned tables: what they may say, where they lie, that the shipped ones are good and are shipped."""

import copy
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_a2a.errors import ConfigError
from ep_a2a.tuning import tables as tuning
from ep_a2a.tuning.policy import Phase, choose_launch
from ep_a2a.tuning.tables import TunedLaunch, TunedTables
from tests.cases.tables import read_json
from tests.unit.test_tuning import (
    BF16_ROW_BYTES,
    COMBINE,
    EVIDENCE,
    FP8_ROW_BYTES,
    H200_SMS,
    PROJECT,
    chosen,
    config_of,
    entry,
    key,
)

SHIPPED = sorted((PROJECT / "configs").glob("*.json"))


# --- files ---


TABLES = read_json("tuning_tables")


def good_table() -> dict[str, Any]:
    table: dict[str, Any] = copy.deepcopy(TABLES["good"])
    return table


def refused(content: Any, tmp_path: Path, phase: str = "combine") -> ConfigError:
    path = tmp_path / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        tuning.read_table(path, phase)
    assert "ep-a2a tune" in caught.value.remedy
    assert str(path) in caught.value.expected
    return caught.value


def test_a_good_table_is_read(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(good_table()))
    (read,) = tuning.read_table(path, "combine")
    assert (read.key, read.origin) == (key(16), str(path))
    assert read.launch == TunedLaunch(4, 0, 1, 2, 1024, 1024, 0)
    assert (read.evidence.us, read.evidence.note) == (1.5, "")


@pytest.mark.parametrize(("part", "name", "value", "expected"), TABLES["wrong_fields"])
def test_a_wrong_field_is_named(part, name, value, expected, tmp_path):
    table = good_table()
    table["entries"][0][part][name] = value
    refused_ = refused(table, tmp_path)
    assert refused_.expected
    with pytest.raises(ConfigError, match=expected):
        raise refused_


@pytest.mark.parametrize("part", ["key", "launch", "evidence"])
def test_a_missing_field_is_named(part, tmp_path):
    for name in good_table()["entries"][0][part]:
        table = good_table()
        del table["entries"][0][part][name]
        error = refused(table, tmp_path)
        assert error.expected.startswith(f"{name} in {part} of entry 0")
        assert error.got == "nothing"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"about": "x"}', '{"about": "x", "entries": {}}', "\x00"])
def test_what_is_no_table_is_refused(content, tmp_path):
    refused(content, tmp_path)
    refused(good_table(), tmp_path, "bulk_dispatch")


def test_a_key_comes_once(tmp_path):
    table = good_table()
    table["entries"] *= 2
    assert "one entry per key" in refused(table, tmp_path).expected


def test_a_field_comes_once(tmp_path):
    text = json.dumps(good_table()).replace('"num_warps": 4', '"num_warps": 4, "num_warps": 8')
    assert "field 'num_warps' twice" in refused(text, tmp_path).got


def test_writing_keeps_other_entries_and_leaves_no_other_files(tmp_path):
    path = tmp_path / "table.json"
    tuning.write_table(path, "combine", [entry(512), entry(16)])
    faster = replace(entry(16, replace(COMBINE, num_warps=2)), evidence=replace(EVIDENCE, us=9.0, note="why"))
    tuning.write_table(path, "combine", [faster, entry(1)])
    read = tuning.read_table(path, "combine")
    assert read == (entry(1), faster, entry(512))
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_entries_of_a_bound_lie_beside_those_of_the_whole_gpu(tmp_path):
    path = tmp_path / "table.json"
    bounded = entry(512, replace(COMBINE, send_rows=4), max_sms=24)
    tuning.write_table(path, "combine", [bounded])
    tuning.write_table(path, "combine", [entry(512)])
    assert tuning.read_table(path, "combine") == (entry(512), bounded)


def test_a_table_that_cannot_be_read_is_not_written_over(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("mine")
    with pytest.raises(ConfigError):
        tuning.write_table(path, "combine", [entry(1)])
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


# --- where tables lie ---


def reason(tables: TunedTables, size: int, phase: Phase = Phase.COMBINE) -> str:
    return chosen(phase, size, size, tables).reason


def test_shipped_tables_are_found_by_arch_and_ranks():
    tables = tuning.load_tables("sm_90", 2)
    name = "sm_90_intra_node_ep2_combine.json"
    assert reason(tables, 128) == f"tuned table {name}, exact"
    assert reason(tables, 100) == f"tuned table {name}, nearest: 128"
    assert (
        reason(tables, 128, Phase.LOW_LATENCY_DISPATCH)
        == f"tuned table {name.replace('combine', 'low_latency_dispatch')}, exact"
    )
    for arch, ranks in (("sm_80", 2), ("sm_100", 2), ("sm_90", 3), ("sm_90", 72)):
        assert reason(tuning.load_tables(arch, ranks), 128) == "analytic"
    assert tuning.arch_name((9, 0)) == "sm_90"
    assert tuning.arch_name((10, 3)) == "sm_103"


def test_the_users_tables_come_first(tmp_path, monkeypatch):
    monkeypatch.setenv("EP_A2A_TUNING_DIR", str(tmp_path))
    path = tmp_path / "sm_90_intra_node_ep2_combine.json"
    assert reason(tuning.load_tables("sm_90", 2), 128) == "tuned table sm_90_intra_node_ep2_combine.json, exact"
    tuning.write_table(path, "combine", [entry(128)])
    tables = tuning.load_tables("sm_90", 2)
    assert reason(tables, 128) == f"tuned table {path}, exact"
    assert chosen(Phase.COMBINE, 128, 128, tables).num_warps == COMBINE.num_warps
    # shipped entries of other keys stay
    assert reason(tables, 16) == "tuned table sm_90_intra_node_ep2_combine.json, exact"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=str(path)):
        tuning.load_tables("sm_90", 2)


def test_none_means_no_tables_and_a_missing_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("EP_A2A_TUNING_DIR", "none")
    assert reason(tuning.load_tables("sm_90", 2), 128) == "analytic"
    monkeypatch.setenv("EP_A2A_TUNING_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="EP_A2A_TUNING_DIR to be a folder, or none"):
        tuning.load_tables("sm_90", 2)
    monkeypatch.setenv("EP_A2A_TUNING_DIR", "")
    assert reason(tuning.load_tables("sm_90", 2), 128) != "analytic"


# --- the shipped tables ---


def test_there_are_shipped_tables():
    assert {path.name for path in SHIPPED} >= {tuning.table_name("sm_90", 4, phase) for phase in tuning.PHASES}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_parse_and_their_launches_fit(path):
    parts = path.stem.split("_ep")
    num_ranks, _, phase = parts[1].partition("_")
    assert parts[0].endswith("_intra_node")
    table = tuning.read_table(path, phase, path.name)
    assert table
    for line in table:
        size, max_sms = line.key.max_num_tokens, line.key.max_sms
        config = config_of(
            world_size=int(num_ranks),
            hidden_dim=line.key.hidden_dim,
            num_experts_per_token=line.key.topk,
            max_num_inp_token_per_rank=size,
            quant_type="none" if line.key.cast == "bfloat16" else line.key.cast,
            max_sms=max_sms,
        )
        tables = TunedTables({phase: table})
        launch = choose_launch(config, Phase(phase), size, size, H200_SMS, tables=tables)
        assert launch.reason == f"tuned table {path.name}, exact"
        # nothing was cut off but programs without work
        assert launch.num_warps == line.launch.num_warps
        assert launch.num_programs <= (max_sms or H200_SMS * 2048 // (32 * launch.num_warps))
        assert launch.num_senders == line.launch.num_senders or not max_sms or not line.launch.num_senders
        units = choose_launch(config, Phase(phase), size, size, 100 * H200_SMS, tables=tables)
        assert launch == units or max_sms


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_say_what_was_measured(path):
    phase = next(phase for phase in ("low_latency_dispatch", "bulk_dispatch", "combine") if path.stem.endswith(phase))
    assert "round trip" in json.loads(path.read_text())["about"]
    for line in tuning.read_table(path, phase):
        evidence = line.evidence
        assert {"torch", "triton"} <= set(evidence.versions)
        assert evidence.device
        if line.key.hidden_dim == 7168:
            back = FP8_ROW_BYTES if line.key.cast == "fp8_blockwise" else BF16_ROW_BYTES
            num_bytes = evidence.remote_rows * (FP8_ROW_BYTES + back)
            assert evidence.gb_per_s == pytest.approx(num_bytes / evidence.us / 1e3, abs=0.06)


def test_all_packages_and_tables_are_listed_for_wheels():
    setup = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {".".join(path.parent.relative_to(PROJECT).parts) for path in (PROJECT / "ep_a2a").rglob("*.py")}
    assert set(setup["packages"]) == packages | {"ep_a2a.configs"}
    assert setup["package-dir"] == {"ep_a2a.configs": "configs"}
