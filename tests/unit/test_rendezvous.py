"""Messages of a meeting: whatever bytes lie in the store, a rank gets a message of its kind or an error of ours."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ep_a2a.config.op_config import WIRE_FORMAT_VERSION
from ep_a2a.errors import ConfigMismatchError, EpA2AError, RankTimeoutError
from ep_a2a.memory.rendezvous import Rendezvous, is_like
from ep_a2a.topology.facts import VERSION_KEY, with_version

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


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def meet(group, text: bytes, own: object = None) -> list[object]:
    """Rank 0 of two meets one that has written `text`."""
    store = dist.HashStore()
    store.set("ep_a2a/of/0,1/" + f"{(1 << 32) + 1}/1", text)
    return Rendezvous(group, 1.0, members=(0, 1), store=store).exchange(LABEL, own)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=BYTES, own=st.sampled_from(OWN_MESSAGES))
def test_any_bytes(group, text, own):
    try:
        messages = meet(group, text, own)
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
    ],
)
def test_the_rank_is_named(group, text):
    with pytest.raises(ConfigMismatchError, match=r"rank 1 at 'a meeting'|on ranks \[1\]"):
        meet(group, text, "a name")


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


def test_who_did_not_come_and_lives_is_late(group):
    meeting = Rendezvous(group, 0.01, members=(0, 1, 2), store=dist.HashStore())
    meeting.tell_apart = lambda ranks, stopped_secs: ((2,), (1,))
    with pytest.raises(RankTimeoutError, match="no sign of ranks 1, 2; the processes of ranks \\[1\\] run") as caught:
        meeting.barrier(LABEL)
    assert (caught.value.missing_ranks, caught.value.late_ranks) == ((2,), (1,))


def test_a_store_that_has_ended_is_named_before_anything_is_said(group):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    with pytest.raises(RankTimeoutError, match=r"the store of .* ep_a2a\.survivors\(\.\.\., store=\)"):
        Rendezvous(group, 1.0, store=client)
