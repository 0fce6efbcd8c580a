"""What `make test` runs. This is the one place where a test gets into it, or out of it.

tests/unit and tests/simulator are in it, but for tests that are marked `full`. Of other folders it runs
what QUICK names, again without what is marked `full`. `make test-all` runs everything. The mark fits single cases, too:
`pytest.param(..., marks=pytest.mark.full)`.
"""

QUICK_FOLDERS = ("unit", "simulator")
QUICK = (
    # one step, by hand
    "multiprocess/test_first.py",
    # every allowed pair of layout, dtype, cast, routing, world size and transport
    "multiprocess/test_covering.py",
    # every special body once, but for slow ones: time, graphs, memory, failures
    "multiprocess/test_op_special.py",
    # every manager that works on CPU
    "multiprocess/test_backend_parity.py::test_parity",
    # the backend and the transport of CONTRIBUTING.md
    "multiprocess/test_contributing.py",
    # interfaces of other projects
    "multiprocess/test_mori.py::test_the_complete_program",
    # gradients, with inputs that each rank freezes
    "multiprocess/test_autograd.py::test_two_layers_and_an_unused_dispatch",
    # the pools of ranks that all of these stand on
    "multiprocess/test_launch.py",
    # an error of one rank, at ten lines by seed of each kind of call
    "multiprocess/test_one_ranks_error.py",
    # a real process that is killed while others wait for it
    "multiprocess/test_faults.py::test_a_rank_killed_from_outside",
)
"""Files or single tests, below tests/."""


def is_quick(path: str, function: str) -> bool:
    """Whether `make test` runs a test that is not marked `full`; path: of its file, below tests/."""
    return path.split("/")[0] in QUICK_FOLDERS or path in QUICK or f"{path}::{function}" in QUICK
