"""Messages of a meeting: whatever bytes lie in the store, a rank gets a message of its kind or an error of ours."""

import json
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from ep_a2a.config.op_config import WIRE_FORMAT_VERSION
from ep_a2a.errors import ConfigMismatchError, EpA2AError, HostMemoryError, RankTimeoutError
from ep_a2a.memory.host_record import HostRecord
from ep_a2a.memory.rendezvous import VERSION_KEY, Rendezvous, is_like, store_must_answer, with_version

LABEL = "a meeting"
OWN_MESSAGES = ({"fields": {}, "error": None}, [1, "cpu"], "name", 7, True, None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ANSWERS = st.fixed_dictionaries(
    {}, optional={VERSION_KEY: st.just(WIRE_FORMAT_VERSION) | JSON, "label": st.just(LABEL) | JSON, "message": JSON}
)
BYTES = (
    st.binary(max_size=40)
    | JSON.map(lambda value: json.dumps(value).encode())
    | ANSWERS.map(lambda value: json.dumps(value).encode())
)


class Group:
    """Stands for a process group of two."""

    def __init__(self, store: dist.Store, rank: int = 0) -> None:
        self.store, self.rank = store, rank


@pytest.fixture(autouse=True)
def _groups_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(distributed_c10d, "_get_process_group_store", lambda group: group.store)


def meet(text: bytes, own: object = None) -> list[object]:
    """Rank 0 of two meets one that has written `text`."""
    store = dist.HashStore()
    store.set("ep_a2a/" + f"{(1 << 32) + 1}/1", text)
    group: Any = Group(store)
    return Rendezvous(group, 1.0).exchange(LABEL, own)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (dist.DistStoreError("No space left on device"), HostMemoryError, "RankPool's"),
        (dist.DistStoreError("wait timeout after 10000ms"), RankTimeoutError, "has ended"),
        (dist.DistNetworkError("connection refused"), RankTimeoutError, "has ended"),
    ],
)
def test_a_store_that_fails_is_an_error_of_ours(error: Exception, kind: type[EpA2AError], said: str) -> None:
    with pytest.raises(kind, match=said), store_must_answer(LABEL, None):
        raise error


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=BYTES, own=st.sampled_from(OWN_MESSAGES))
def test_any_bytes(text, own):
    try:
        messages = meet(text, own)
    except EpA2AError:
        return
    assert messages[0] == own
    assert is_like(messages[1], own)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"[" * 100_000,
        b"{}",
        json.dumps(with_version({"label": 3})).encode(),
        json.dumps(with_version({"label": LABEL, "message": [1]})).encode(),
        json.dumps(with_version({"label": "another one", "message": "a name"})).encode(),
    ],
)
def test_the_rank_is_named(text):
    said = r"rank 1 at 'a meeting'|on ranks \[1\]|rank 0 is at 'a meeting'; got rank 1 at 'another one'"
    with pytest.raises(ConfigMismatchError, match=said):
        meet(text, "a name")


def test_messages_that_ranks_send_fit_each_other():
    for own, other in (
        ({"fields": {"a": "1"}, "error": None}, {"fields": {}, "error": "text"}),
        (None, "why not"),
        (None, ["error", "why"]),
        (1.5, 2),
        ([], [1.0]),
        ("handle", None),
    ):
        assert is_like(other, own)
        assert is_like(own, other)


def test_a_store_that_has_ended_is_named_before_anything_is_said():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    group: Any = Group(client)
    with pytest.raises(RankTimeoutError, match=r"the store of .* ep_a2a\.survivors\(\.\.\., store=\)"):
        Rendezvous(group, 1.0)


def test_a_rank_that_comes_when_others_have_given_up_is_told(monkeypatch):
    # both ranks are in this process, which sees its own locks as free
    monkeypatch.setattr(HostRecord, "has_ended", lambda *_: False)
    store = dist.HashStore()
    groups: list[Any] = [Group(store, rank) for rank in range(2)]
    first, second = (Rendezvous(group, 0.01) for group in groups)
    with pytest.raises(RankTimeoutError, match="no sign of rank 1") as caught:
        first.barrier(LABEL)
    assert caught.value.late_ranks == (1,)
    with pytest.raises(RankTimeoutError, match="this rank, 1, came after the others had given up") as caught:
        second.barrier(LABEL)
    assert caught.value.late_ranks == (1,)


@pytest.mark.parametrize(
    "text", [b"\xff", b"3", b"[1]", b"[[], [], [[1]]]", b'[["a"], [], []]', b"[[], [Infinity], []]"]
)
def test_a_decision_that_is_none_is_an_error(text):
    store = dist.HashStore()
    group: Any = Group(store)
    store.set(f"ep_a2a/{(1 << 32) + 1}/decision", text)
    with pytest.raises(ConfigMismatchError, match="no decision"):
        Rendezvous(group, 1.0).barrier(LABEL)
