"""The limit's CUDA C: what it is made of, and, where there is a compiler, that it moves wide words many at a time."""

import re
import shutil
import subprocess

import pytest
import torch

from ep_a2a.commands.bench.reference_push import launches_to_try
from ep_a2a.commands.measure.push import LOADS_IN_FLIGHT, MAX_THREADS, Peer, PushLaunch, compile_push, push_source
from ep_a2a.errors import UnsupportedError


def peers_of(num_peers: int) -> list[Peer]:
    return [
        Peer(7 * n, 100 + n, 0x7F0000000000 + 16 * n, 0x7F1000000000 + n, 0x7F2000000000 + n) for n in range(num_peers)
    ]


def test_addresses_are_in_the_source():
    source = push_source(peers_of(3))
    assert "DO(2, 14, 102, 0x7f0000000020ULL, 0x7f1000000002ULL, 0x7f2000000002ULL)" in source
    assert source.isascii()


def test_a_launch_without_a_bound_has_as_many_programs_for_each_peer():
    for launch in launches_to_try(7, 0):
        assert launch.num_programs % 7 == 0
        assert launch.num_threads <= MAX_THREADS
        assert (launch.num_loads, launch.spreads) == (LOADS_IN_FLIGHT, False)


@pytest.mark.parametrize(("num_peers", "bound"), [(3, 8), (7, 4)])
def test_a_bound_is_the_number_of_programs_whatever_the_number_of_peers(num_peers, bound):
    launches = launches_to_try(num_peers, bound)
    assert launches[0] == PushLaunch(bound, 256, 1, True)
    assert {launch.num_programs for launch in launches} == {bound}
    assert {launch.num_loads for launch in launches} == {1, 2, 4, 8}
    assert all(launch.spreads and launch.num_threads <= MAX_THREADS for launch in launches)


@pytest.mark.parametrize(
    ("num_peers", "num_loads", "spreads"), [(1, 8, False), (3, 8, False), (7, 8, False), (3, 8, True), (7, 1, True)]
)
def test_all_loads_in_flight_come_before_the_first_store(tmp_path, num_peers, num_loads, spreads):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = tmp_path / "push.cu"
    path.write_text(push_source(peers_of(num_peers), num_loads, spreads=spreads))
    subprocess.run([nvcc, "-arch=compute_90", "-ptx", "-o", tmp_path / "push.ptx", path], check=True, timeout=120)
    ptx = (tmp_path / "push.ptx").read_text()
    accesses = re.findall(r"\b(ld|st)\.global\S*\.v4\.u32", ptx)
    assert accesses[: 2 * num_loads] == ["ld"] * num_loads + ["st"] * num_loads
    # one loop over peers, not a copy of the code for each
    assert len(accesses) == 2 * sum(range(1, num_loads + 1))
    assert [len(re.findall(rf"\b{kind}", ptx)) for kind in ("atom.acq_rel.gpu", "st.release.sys")] == [1, 1]
    assert "ld.acquire.sys" in ptx
    assert ".local" not in ptx


def test_a_torch_that_cannot_compile_is_named(monkeypatch):
    monkeypatch.delattr(torch.cuda, "_compile_kernel", raising=False)
    with pytest.raises(UnsupportedError, match=re.escape(torch.__version__)):
        compile_push(peers_of(1))
