"""The limit's CUDA C: what it is made of, and, where there is a compiler, that it moves wide words many at a time."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

from ep_a2a.commands.bench.reference_push import GPU_LAUNCHES
from ep_a2a.commands.measure.push import LOADS_IN_FLIGHT, MAX_THREADS, Peer, compile_push, push_source
from ep_a2a.errors import UnsupportedError


def peers_of(num_peers: int) -> list[Peer]:
    return [
        Peer(7 * n, 100 + n, 0x7F0000000000 + 16 * n, 0x7F1000000000 + n, 0x7F2000000000 + n) for n in range(num_peers)
    ]


def test_addresses_are_in_the_source():
    source = push_source(peers_of(3))
    assert "DO(2, 14, 102, 0x7f0000000020ULL, 0x7f1000000002ULL, 0x7f2000000002ULL)" in source
    assert source.isascii()
    assert max(threads for _, threads in GPU_LAUNCHES) <= MAX_THREADS


@pytest.mark.parametrize("num_peers", [1, 3, 7])
def test_eight_wide_loads_come_before_the_first_store(tmp_path, num_peers):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = tmp_path / "push.cu"
    path.write_text(push_source(peers_of(num_peers)))
    subprocess.run([nvcc, "-arch=compute_90", "-ptx", "-o", tmp_path / "push.ptx", path], check=True, timeout=120)
    ptx = (tmp_path / "push.ptx").read_text()
    accesses = re.findall(r"\b(ld|st)\.global\S*\.v4\.u32", ptx)
    assert accesses[: 2 * LOADS_IN_FLIGHT] == ["ld"] * LOADS_IN_FLIGHT + ["st"] * LOADS_IN_FLIGHT
    assert [len(re.findall(rf"\b{kind}", ptx)) for kind in ("atom.acq_rel.gpu", "st.release.sys")] == [1, 1]
    assert "ld.acquire.sys" in ptx
    assert ".local" not in ptx


def test_a_torch_that_cannot_compile_is_named(monkeypatch):
    monkeypatch.delattr(torch.cuda, "_compile_kernel", raising=False)
    with pytest.raises(UnsupportedError, match=re.escape(torch.__version__)):
        compile_push(peers_of(1))
