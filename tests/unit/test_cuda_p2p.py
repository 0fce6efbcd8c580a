"""What becomes of CUDA IPC memory where a rank cannot have it, with a CUDA runtime that is made up."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.errors import ConfigMismatchError, DeviceMemoryError, EpA2AError, PeerAccessError
from ep_a2a.memory import cuda_p2p
from ep_a2a.memory.rendezvous import Rendezvous

ADDRESS, PEER_ADDRESS, NUM_BYTES = 4096, 8192, 64
FAILURE = (2,)


class Runtime:
    """The calls of cuda.bindings.runtime that are needed; the one named `broken` fails."""

    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        results = {
            "cudaMalloc": ADDRESS,
            "cudaIpcOpenMemHandle": PEER_ADDRESS,
            "cudaIpcGetMemHandle": SimpleNamespace(reserved=b"handle"),
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(f"{name} {arguments[0]}" if name in ("cudaFree", "cudaIpcCloseMemHandle") else name)
            return FAILURE if name == self.broken else (0, results.get(name))

        return (lambda: SimpleNamespace(reserved=b"")) if name == "cudaIpcMemHandle_t" else call


class Meeting:
    """Rank 0 of two; the other one fails in what `other_fails` names."""

    rank, world_size = 0, 2
    attempt = Rendezvous.attempt

    def __init__(self, other_fails: str = "") -> None:
        self.other_fails = other_fails

    def telling(self, waiting_at: str | None = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def barrier(self, what: str) -> None:
        if what == self.other_fails:
            raise ConfigMismatchError(what, "the other rank failed")

    def exchange(self, what: str, mine: str) -> list[str]:
        return [mine, b"other".hex()]


def allocate(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, meeting: Meeting) -> Any:
    cuda = SimpleNamespace(device=lambda _: contextlib.nullcontext(), synchronize=lambda _: None)
    monkeypatch.setattr(cuda_p2p, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_p2p, "_runtime", lambda: runtime)
    monkeypatch.setattr(cuda_p2p, "bytes_at", lambda *_: torch.empty(0))
    return cuda_p2p._allocate_ipc(meeting, torch.device("cpu"), NUM_BYTES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "other_fails", "error", "given_back"),
    [
        ("", "allocating CUDA memory", ConfigMismatchError, ["cudaFree 4096"]),
        ("cudaMemset", "", DeviceMemoryError, ["cudaFree 4096"]),
        ("cudaMalloc", "", DeviceMemoryError, []),
        ("", "mapping CUDA memory", ConfigMismatchError, ["cudaIpcCloseMemHandle 8192", "cudaFree 4096"]),
        ("cudaIpcOpenMemHandle", "", PeerAccessError, ["cudaFree 4096"]),
    ],
)
def test_memory_that_not_all_ranks_have_is_given_back(
    monkeypatch: pytest.MonkeyPatch, broken: str, other_fails: str, error: type[EpA2AError], given_back: list[str]
) -> None:
    runtime = Runtime(broken)
    with pytest.raises(error):
        allocate(monkeypatch, runtime, Meeting(other_fails))
    assert [call for call in runtime.calls if "Free" in call or "Close" in call] == given_back


def test_memory_that_all_ranks_have_is_kept_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    memory = allocate(monkeypatch, runtime, Meeting())
    assert not [call for call in runtime.calls if "Free" in call or "Close" in call]
    assert memory.peer_addresses == (ADDRESS, PEER_ADDRESS)
    memory.close()
    assert runtime.calls[-2:] == ["cudaIpcCloseMemHandle 8192", "cudaFree 4096"]
