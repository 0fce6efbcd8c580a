"""What this package never does: unpickle from a network, write to the environment, run code of other users."""

import ast
import logging
import os
import re
from pathlib import Path

import pytest

import ep_a2a
from ep_a2a import env
from ep_a2a.errors import UntrustedFolderError
from ep_a2a.memory import transport_choice

PACKAGE = Path(ep_a2a.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
PICKLE_USERS = {
    # tasks and answers of processes that the pool itself has started, through their inherited pipes
    "testing/launch.py",
    "testing/worker.py",
}
UNPICKLERS = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
CONNECTORS = ("http", "urllib", "requests", "socketserver", "xmlrpc")


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


@pytest.mark.parametrize(
    ("names", "callers"),
    [
        # ranks meet through torch.distributed: nothing listens or connects
        (r"socket\.(create_connection|create_server|socket)", []),
        # no text is run as code
        (r"eval|exec|compile|__import__|os\.(system|popen)", []),
        # a forked rank of a RankPool gets the environment of the process that owns the pool
        (r".*(putenv|unsetenv|environ\.(update|pop|setdefault|clear))", ["env.py", "env.py"]),
        (r"env\.take_over", ["testing/worker.py"]),
        # while processes start, which take this variable from there only
        (r"env\.safe_path", ["testing/launch.py"]),
        # EP_A2A_RDMA_DEVICES, for NCCL and NVSHMEM, which take their devices from variables only
        (r"env\.set_unless_set", ["memory/transport_choice.py"]),
    ],
)
def test_who_calls(names, callers):
    found = [path for path, tree in TREES.items() for call in calls(tree) if re.fullmatch(names, name_of(call))]
    assert found == callers


def test_who_reads_and_connects_by_modules():
    of_module = {path: imported(tree) for path, tree in TREES.items()}
    assert {path for path, names in of_module.items() if names & set(UNPICKLERS)} == PICKLE_USERS
    assert not [path for path, names in of_module.items() if names & set(CONNECTORS)]


def test_keywords_of_calls():
    """Neither a shell nor, since torch refuses anything but tensors and plain values, weights_only."""
    for path, tree in TREES.items():
        for call in calls(tree):
            assert not [each for each in call.keywords if each.arg in ("shell", "weights_only")], path
            assert name_of(call) != "torch.load" or path in PICKLE_USERS


def test_the_environment_is_written_in_one_place():
    writers = [
        ast.unparse(node)
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.Delete | ast.AugAssign)
        for target in (node.targets if not isinstance(node, ast.AugAssign) else [node.target])
        if "environ" in ast.unparse(target)
    ]
    assert [text for text in writers if "[SAFE_PATH]" not in text] == ["os.environ[name] = value"]


def test_the_environment_stays_as_it_is_unless_devices_are_named():
    before = dict(os.environ)
    transport_choice.name_network_devices()
    for variable in env.VARIABLES:
        variable.get()
    assert dict(os.environ) == before


@pytest.mark.parametrize("before", [None, "", "1"])
def test_the_safe_path_is_taken_back(monkeypatch, before):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with env.safe_path():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == before


# --- compiled kernels ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def test_nothing_is_compiled_into_or_loaded_from_such_a_cache(cache):
    """Neither by an op's variants nor by a plain launch: both go through `run`."""
    from ep_a2a.kernels.span_kernels import note_clock_kernel

    cache.chmod(0o777)
    for call in (lambda: note_clock_kernel.warmup(grid=(1,)), lambda: note_clock_kernel[(1,)]()):
        with pytest.raises(UntrustedFolderError):
            call()
    assert list(cache.iterdir()) == []


def test_logs_hold_no_tokens():
    """Loggers are told sizes, names and reasons; a tensor in a log call would be somebody's text."""
    logged = [
        (path, ast.unparse(argument))
        for path, tree in TREES.items()
        for call in calls(tree)
        if name_of(call).startswith(("logger.", "_log."))
        for argument in call.args[1:]
    ]
    tensors = ("tokens", "rows", "weights", "scales", "input", "x")
    assert not [each for each in logged if each[1] in tensors]
    assert logging.getLogger("ep_a2a").handlers == []
