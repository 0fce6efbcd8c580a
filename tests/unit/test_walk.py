"""tools/walk.py: how many files a reader opens who follows a call."""

import functools

from ep_a2a.memory.guards import SharedBlocks
from tools import walk


def test_a_warm_dispatch_enters_few_files(ranks):
    found = ranks(walk.walk_of, 1, "dispatch")[0]
    assert found.files[:2] == ["memory/guards.py", "ops/base_op.py"]
    assert found.files[-2:] == ["kernels/compiled_kernel.py", "ops/arguments.py"]
    assert len(found.files) <= 8, walk.report("dispatch", found)
    assert found.num_calls <= 36, walk.report("dispatch", found)


def test_a_warm_combine_enters_few_files(ranks):
    found = ranks(walk.walk_of, 1, "combine")[0]
    assert len(found.files) <= 8, walk.report("combine", found)


def test_a_new_op_is_built(ranks):
    found = ranks(walk.walk_of, 1, "get_handle")[0]
    assert {"managers/native.py", "ops/factory.py", "ops/op.py", "ops/intra_node.py"} <= set(found.files)


def test_managers_reach_the_same_launch(ranks):
    found = ranks(walk.walk_of, 2, "manager")[0]
    assert {"managers/base.py", "ops/base_op.py", "kernels/compiled_kernel.py"} <= set(found.files)
    assert len(found.files) <= 10, walk.report("manager", found)


def test_only_calls_of_python_functions_count():
    slot = SharedBlocks()
    found = walk.record(functools.partial(slot.enter, test_only_calls_of_python_functions_count))
    assert found.functions == {"memory/guards.py": ["SharedBlocks.enter"]}
    assert found.num_calls == 1
