"""`ep-a2a tune`: the search, what becomes of its outcome, and where it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli.app import make_app
from ep_a2a.commands import tune, tune_overlap
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.commands.tune import default_output, show
from ep_a2a.errors import ConfigError, UnsupportedError
from ep_a2a.testing.launch import RankFailure
from ep_a2a.topology.gpu_share import sharing_note
from ep_a2a.tuning import tables as tuning
from ep_a2a.tuning.policy import Phase, choose_launch, dispatch_phase
from ep_a2a.tuning.tables import TunedLaunch
from tests.unit.test_tuning import BF16_ROW_BYTES, FP8_ROW_BYTES, H200_SMS, PROJECT, config_of, key

# --- ep-a2a tune ---


def test_without_gpus_there_is_nothing_to_tune(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = CliRunner().invoke(make_app(), ["tune"])
    assert isinstance(result.exception, UnsupportedError)
    assert "say nothing about them" in result.exception.expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="2 ranks at least"):
        tune.check_can_tune(1)
    for ranks in (2, 8):
        tune.check_can_tune(ranks)


def test_tables_go_to_the_users_folder_or_the_checkouts(tmp_path, monkeypatch):
    assert default_output() == PROJECT / "configs"
    monkeypatch.setenv("EP_A2A_TUNING_DIR", "none")
    assert default_output() == PROJECT / "configs"
    monkeypatch.setenv("EP_A2A_TUNING_DIR", str(tmp_path))
    assert default_output() == tmp_path
    with pytest.raises(ConfigError, match=r"--output DIR where ranks share GPUs.*8 ranks share 1 GPU"):
        default_output(sharing_note(8, 1))
    monkeypatch.delenv("EP_A2A_TUNING_DIR")
    # in an installation the folder belongs to the package manager
    monkeypatch.setattr(tuning, "shipped_directory", lambda: PROJECT / "ep_a2a" / "configs")
    with pytest.raises(ConfigError, match="--output"):
        default_output()


@pytest.mark.parametrize("size", [1, 64, 128, 4096])
def test_the_search_starts_from_the_analytic_launch(size):
    config = config_of(max_num_inp_token_per_rank=size)
    launches = tune.chosen_launches(config, H200_SMS)
    assert list(launches) == [dispatch_phase(config, size).value, "combine"]
    analytic = [choose_launch(config, Phase(phase), size, size, H200_SMS) for phase in launches]
    assert tune.effect_of(config, launches, H200_SMS) == tuple(replace(one, reason="") for one in analytic)


def test_the_search_for_a_bound_tries_what_the_bound_leaves_open():
    config = config_of(max_num_inp_token_per_rank=4096, max_sms=24)
    start = tune.chosen_launches(config, H200_SMS)
    tried = []
    search = tune.Search(
        lambda launches: float(len(tried.append(launches) or tried)),
        lambda launches: tune.effect_of(config, launches, H200_SMS),
        lambda: True,
    )
    search.run(start)
    found = {
        (phase, name)
        for launches in tried
        for phase, launch in launches.items()
        for name in ("num_warps", "num_senders", "send_rows", "send_elements", "num_receivers", "num_programs")
        if getattr(launch, name) != getattr(start[phase], name)
    }
    of_combine = {("combine", name) for name in ("num_warps", "num_senders", "send_rows")}
    assert found == of_combine | {("bulk_dispatch", "num_warps")}
    assert tried[0] == start


class MadeUpPool:
    """Searches nothing; fails for 8 tokens."""

    made: ClassVar[list[MadeUpPool]] = []
    note = ""

    def __init__(self, *_: object, **__: object) -> None:
        self.asked: list[int] = []
        self.is_open = True
        self.made.append(self)

    def run(self, _: object, workload: Workload, *__: object) -> list[tune.Outcome]:
        self.asked.append(workload.num_tokens)
        if workload.num_tokens == 8:
            raise RankFailure("a rank died", {0: "it died"})
        return [outcome_of(workload.num_tokens)]

    def close(self) -> None:
        self.is_open = False


def test_one_pool_searches_for_all_points_and_a_new_one_after_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "RankPool", MadeUpPool)
    points = [outcome_of(size).workload for size in (512, 1024, 8, 16, 32)]
    assert not tune.execute(points, TimingSettings(), 1.0, tmp_path)
    assert [(pool.asked, pool.is_open) for pool in MadeUpPool.made] == [([512, 1024, 8], False), ([16, 32], False)]


def test_bounds_and_casts_are_points_of_one_command(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    seen = []
    monkeypatch.setattr(tune, "execute", lambda points, *_, **__: bool(seen.extend(points)) or True)
    options = ["--max-sms", "8,24", "--combine-quant", "none,fp8_blockwise", "--max-tokens", "512,4096"]
    assert CliRunner().invoke(make_app(), ["tune", *options, "--output", str(tmp_path)]).exit_code == 0
    assert [(each.combine_quant, each.max_sms, each.num_tokens) for each in seen] == [
        (cast, bound, size) for cast in ("none", "fp8_blockwise") for bound in (8, 24) for size in (512, 4096)
    ]
    outcome = replace(outcome_of(512), workload=seen[0])
    assert {one.key.max_sms for one in tune.entries_of(outcome).values()} == {8}


def searched(best: TunedLaunch, budget: int = 10_000) -> tuple[tune.Launches, tune.Search]:
    """A search where the time is the number of numbers that are not the best ones."""
    config = config_of(max_num_inp_token_per_rank=4096)
    spent = []

    def time_of(launches: tune.Launches) -> float:
        spent.append(launches)
        off = sum(
            abs(math.log2(getattr(launches["combine"], name) / getattr(best, name)))
            for name in ("num_warps", "send_elements", "num_senders")
        )
        return 100.0 + 10 * off if launches["combine"].add_elements != 2048 else math.inf

    search = tune.Search(
        time_of, lambda launches: tune.effect_of(config, launches, H200_SMS), lambda: len(spent) < budget
    )
    return search.run(tune.chosen_launches(config, H200_SMS)), search


def test_the_search_follows_what_is_faster_and_takes_nothing_wrong():
    start = tune.chosen_launches(config_of(), H200_SMS)["combine"]
    best = TunedLaunch(start.num_warps // 2, 0, start.num_senders // 2, 1, start.send_elements // 4, 1)
    found_, search = searched(best)
    combine = found_["combine"]
    assert (combine.num_warps, combine.send_elements, combine.num_senders) == (
        best.num_warps,
        best.send_elements,
        best.num_senders,
    )
    assert combine.add_elements != 2048
    assert search.is_complete
    # effects are timed once
    assert search.num_trials < 80


def test_the_search_ends_with_its_budget():
    start, search = searched(TunedLaunch(2, 0, 32, 1, 2048, 1), budget=1)
    assert start == tune.chosen_launches(config_of(), H200_SMS)
    assert (search.num_trials, search.is_complete) == (1, False)


def outcome_of(num_tokens: int) -> tune.Outcome:
    workload = Workload(4, num_tokens, num_tokens, quant_type="fp8_per_1x128")
    default = tune.chosen_launches(config_of(max_num_inp_token_per_rank=num_tokens), H200_SMS)
    return tune.Outcome(workload, default, default, 110.0, 99.0, 7, True, "sm_90", "a GPU")


@pytest.mark.parametrize("fails", [False, True])
def test_each_size_is_a_line_of_progress(fails, monkeypatch, tmp_path, capsys):
    points = [outcome_of(size).workload for size in (8, 16)]
    found = {8: outcome_of(8), 16: "16: a rank died" if fails else outcome_of(16)}
    monkeypatch.setattr(tune, "tune_point", lambda point, *_: found[point.max_num_tokens])
    assert tune.execute(points, TimingSettings(), 60.0, tmp_path) is not fails
    out, err = capsys.readouterr()
    last = "2/2 16: a rank died" if fails else "2/2 16 tokens: 110.0 -> 99.0 µs"
    assert err.splitlines() == ["1/2 8 tokens: 110.0 -> 99.0 µs", last, f"tables: {tmp_path}"]
    assert "round trips" in out


@pytest.mark.parametrize("size", [4, 128, 4096])
def test_a_program_per_unit_of_work_stays_one_for_larger_steps(size):
    """A number that equals the work at the tuned size would bound the steps of more tokens that take its entry."""
    small, large = (config_of(max_num_inp_token_per_rank=tokens) for tokens in (size, 3 * size // 2))
    analytic = tune.chosen_launches(small, H200_SMS)
    found = tune.open_ended(small, analytic, H200_SMS)
    assert tune.effect_of(small, found, H200_SMS) == tune.effect_of(small, analytic, H200_SMS)
    if dispatch_phase(small, size) is dispatch_phase(large, 3 * size // 2):
        assert tune.effect_of(large, found, H200_SMS) == tune.effect_of(
            large, tune.chosen_launches(large, H200_SMS), H200_SMS
        )
    chosen = analytic | {"combine": replace(analytic["combine"], num_senders=3)}
    assert tune.open_ended(small, chosen, H200_SMS)["combine"].num_senders == 3


def test_outcomes_become_entries_and_a_table_on_the_terminal(tmp_path, capsys):
    workload = Workload(4, 512, 512, quant_type="fp8_per_1x128")
    default = tune.chosen_launches(config_of(max_num_inp_token_per_rank=512), H200_SMS)
    best = default | {"combine": replace(default["combine"], num_senders=48)}
    outcome = tune.Outcome(workload, default, best, 110.0, 99.0, 7, False, "sm_90", "a GPU")
    entries = tune.entries_of(outcome)
    assert {phase: one.launch for phase, one in entries.items()} == best
    assert entries["combine"].key == key(512)
    rows = workload.busiest_remote_rows
    expected = rows * (FP8_ROW_BYTES + BF16_ROW_BYTES) / 99.0 / 1e3
    assert entries["combine"].evidence.gb_per_s == pytest.approx(expected, abs=0.06)
    for phase, one in entries.items():
        tuning.write_table(tmp_path / f"{phase}.json", phase, [one])
    show([outcome])
    printed = capsys.readouterr().out
    for text in ("110.0", "99.0", "10.0%", "512"):
        assert text in printed


def rows_of_micro_batches(num_tokens, unsplit_us, **layers_us):
    rows = [{"contender": "in_turn", "layer_us": 100.0}, {"contender": "unsplit", "layer_us": unsplit_us}]
    rows += [{"contender": name.replace("_", "/"), "layer_us": us} for name, us in layers_us.items()]
    more = {"num_tokens": num_tokens, "status": "ok", "experts_us": 80.0, "exchange_us": 20.0}
    return [each | more for each in rows]


def test_the_fastest_number_of_multiprocessors_is_found(monkeypatch):
    sizes = {1024: rows_of_micro_batches(1024, 95.0, overlapped_8=97.0, overlapped_0=98.0)}
    sizes[4096] = rows_of_micro_batches(4096, 95.0, overlapped_8=91.0, overlapped_16=85.0, overlapped_0=98.0)
    sizes[8] = [
        each | {"status": "error", "reason": "lost"} for each in rows_of_micro_batches(8, 1.0, overlapped_8=1.0)
    ]
    asked = {}

    def sweep(points, names, settings, runner, on_record):
        asked.update(names=names)
        for point in points:
            for record in sizes[point.num_tokens]:
                on_record(record)
            yield sizes[point.num_tokens]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(tune_overlap, "run_sweep", sweep)
    monkeypatch.setattr(tune_overlap.messages, "print_json", lambda found: asked.update(found))
    options = ["tune", "--micro-batches", "8,16,0", "--json", "--max-tokens"]
    assert CliRunner().invoke(make_app(), [*options, "1024,4096"]).exit_code == 0
    assert asked["names"][1:] == (
        "in_turn",
        "unsplit",
        *(f"overlapped/{each}" for each in (8, 16, 0)),
        "shared",
    )
    small, large = asked["results"]
    assert (small["num_sms"], small["split"]) == (8, False)
    assert (large["num_sms"], large["split"], large["exposed_share"], large["shares_sm"]) == (16, True, 0.25, False)
    sizes[4096] += rows_of_micro_batches(4096, 95.0, shared=84.0)[2:]
    shown = CliRunner().invoke(make_app(), [each for each in options if each != "--json"] + ["4096"]).output
    assert "shared" in shown
    assert "20.0%" in shown
    assert CliRunner().invoke(make_app(), [*options, "8"]).exit_code == 1
    refused = CliRunner().invoke(make_app(), [*options, "8", "--output", "x"]).exception
    assert "no --output with --micro-batches" in str(refused)
