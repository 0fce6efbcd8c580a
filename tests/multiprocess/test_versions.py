"""Ranks that have different versions of this package: an error that says so, wherever they meet first."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ep_a2a
from ep_a2a import config
from ep_a2a.errors import ConfigMismatchError
from ep_a2a.memory.rendezvous import UNKNOWN, Rendezvous, require_one_version, with_version
from ep_a2a.testing import RankContext

OWN = config.WIRE_FORMAT_VERSION
# Every way in which ranks of a group meet for the first time.
PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
import ep_a2a
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.subgroups import make_subgroup

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
group = dist.group.WORLD
fields = dict(data_type=torch.bfloat16, rank=rank, world_size=2, hidden_dim=64, scale_dim=0, scale_type_size=0,
              max_token_type_size=2, max_num_inp_token_per_rank=4, num_experts_per_rank=2, num_experts_per_token=2)
kwargs = dict(rank=rank, num_ep_ranks=2, input_dtype=torch.bfloat16, quant_dtype=torch.bfloat16, token_hidden_size=64,
              max_num_tokens_per_dp_rank=4, num_local_experts=2, num_experts_per_token=2)
ways = {
    "op": lambda: EpDispatchCombineOp(EpDispatchCombineConfig(**fields), arena=Arena(group, torch.device("cpu"))),
    "ep_a2a": lambda: create_manager("ep_a2a", group).get_handle(kwargs),
    "naive": lambda: create_manager("naive", group).get_handle(kwargs),
    "subgroup": lambda: make_subgroup(group, [0, 1]),
    "init_dist_env": lambda: ep_a2a.init_dist_env(
        tensor_model_parallel_size=1, rankID=0, data_parallel_size=2, data_parallel_rank=rank, backend="gloo"),
}
for name, way in ways.items():
    try:
        way()
        print(json.dumps([name, "nothing", ""]))
    except Exception as error:
        print(json.dumps([name, type(error).__name__, str(error)]))
"""


def copy_of_another_version(folder: Path) -> Path:
    """This package with a wire format of its own."""
    shutil.copytree(Path(ep_a2a.__file__).parent, folder / "ep_a2a", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "ep_a2a" / "config" / "op_config.py"
    source = path.read_text()
    assert source.count(f"WIRE_FORMAT_VERSION = {OWN}\n") == 1
    path.write_text(source.replace(f"WIRE_FORMAT_VERSION = {OWN}\n", f"WIRE_FORMAT_VERSION = {OWN + 1}\n"))
    return folder


def start(rank: int, folder: Path, meeting: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(rank), str(meeting)],
        env={"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_rank_of_another_version_is_an_error_at_construction(tmp_path):
    folders = [Path(ep_a2a.__file__).parents[1], copy_of_another_version(tmp_path)]
    processes = [start(rank, folder, tmp_path / "meeting") for rank, folder in enumerate(folders)]
    try:
        told = [process.communicate(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for output, errors in told:
        results = [json.loads(line) for line in output.splitlines()]
        assert [name for name, _, _ in results] == ["op", "ep_a2a", "naive", "subgroup", "init_dist_env"], errors
        for name, kind, text in results:
            assert kind == "ConfigMismatchError", (name, text)
            assert f"{OWN} on ranks [0]; {OWN + 1} on ranks [1]" in text, name
            assert "Install the same version" in text


def meet_an_older_rank(context: RankContext) -> tuple[type, str]:
    """Rank 1 writes what a version did that knew of no version number."""
    rendezvous = Rendezvous(context.group, timeout_secs=20)
    if context.rank == 1:
        key = rendezvous._key(rendezvous._sequence + 1, 1)
        rendezvous._store.set(key, json.dumps(["symmetric memory size", [4096, "cpu"]]))
        return type(None), ""
    try:
        rendezvous.exchange("symmetric memory size", [4096, "cpu"])
    except ConfigMismatchError as error:
        return type(error), str(error)
    return type(None), ""


def test_a_rank_that_does_not_say_its_version(ranks):
    kind, text = ranks(meet_an_older_rank, 2)[0]
    assert kind is ConfigMismatchError
    assert f"{OWN} on ranks [0]; {UNKNOWN} on ranks [1]" in text


def answers(*versions: int) -> list[Any]:
    return [
        ["label", None] if version is None else {**with_version({}), "wire_format_version": version}
        for version in versions
    ]


def test_equal_versions_are_fine_and_others_are_named():
    require_one_version(answers(OWN, OWN))
    require_one_version([])
    with pytest.raises(ConfigMismatchError, match=r"7 on ranks \[4, 6\]; 8 on ranks \[5\]"):
        require_one_version(answers(7, 8, 7), ranks=(4, 5, 6))
