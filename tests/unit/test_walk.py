"""tools/walk.py: how many files a reader opens who follows a call."""

from __future__ import annotations

import shutil

import pytest

from ep_a2a.memory.use_order import Slot
from tools import walk


def test_a_warm_dispatch_enters_six_files(ranks):
    found = ranks(walk.walk_of, 1, "dispatch")[0]
    assert found.files[0] == "ops/front.py"
    assert found.files[-1] == "kernels/compiled_kernel.py"
    assert len(found.files) <= 6, walk.report("dispatch", found)


def test_a_warm_combine_enters_six_files(ranks):
    found = ranks(walk.walk_of, 1, "combine")[0]
    assert len(found.files) <= 6, walk.report("combine", found)


def test_nine_files_lie_on_the_way_to_a_built_op(ranks):
    found = ranks(walk.walk_of, 1, "get_handle")[0]
    assert {"managers/native.py", "ops/factory.py", "ops/op.py", "ops/intra_node.py"} <= found.on_the_way
    assert len(found.on_the_way) <= 9, walk.report("get_handle", found)


def test_managers_reach_the_same_launch(ranks):
    found = ranks(walk.walk_of, 2, "manager")[0]
    assert {"managers/base.py", "ops/front.py", "kernels/compiled_kernel.py"} <= set(found.files)
    assert len(found.files) <= 8, walk.report("manager", found)


def test_six_files_lead_from_vllms_flag_to_dispatch():
    assert len(walk.walk_from_vllm().files) <= 6


@pytest.mark.parametrize("name", ["make_prepare_finalize", "get_handle"])
def test_a_step_that_has_moved_is_found(tmp_path, name):
    shutil.copytree(walk.PACKAGE / walk.VLLM, tmp_path / walk.VLLM)
    for path in (tmp_path / walk.VLLM).glob("*.py"):
        path.write_text(path.read_text().replace(f"def {name}(", f"def {name}_elsewhere("))
    with pytest.raises(LookupError, match=name):
        walk.walk_from_vllm(tmp_path)


def test_leaves_call_no_other_file():
    slot = Slot()
    found = walk.record(lambda: slot.enter(found_by))
    assert found.files == ["memory/use_order.py"]
    assert found.without_leaves == []
    assert found.functions == {"memory/use_order.py": ["Slot.enter"]}
    assert found.num_calls == 2


def found_by() -> None:
    """Something that can be weakly referenced."""
