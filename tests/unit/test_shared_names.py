"""Names in /dev/shm that are another's, or that a peer makes up: nothing of it is removed or stops a rank."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest
import torch

from ep_a2a.memory import host_shm
from ep_a2a.memory.host_record import HostRecord
from ep_a2a.topology import facts


@pytest.fixture
def stale_name(tmp_path, monkeypatch):
    """A name as of a file of a dead process, in a folder where no other test removes it."""
    monkeypatch.setattr(host_shm, "SHM_DIRECTORY", tmp_path)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    name = f"{host_shm.NAME_PREFIX}{host_shm.process_namespace()}_{process.pid}_{secrets.token_hex(4)}"
    return host_shm.SHM_DIRECTORY / name


def test_a_directory_is_left_alone(stale_name):
    stale_name.mkdir()
    host_shm.remove_stale_files()
    assert stale_name.is_dir()


def test_a_file_of_another_user_is_left_alone(stale_name, monkeypatch):
    stale_name.touch()
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: 12345)
        host_shm.remove_stale_files()
        assert stale_name.exists()
    host_shm.remove_stale_files()
    assert not stale_name.exists()


@pytest.mark.parametrize("name", ["../victim", "/victim", "victim", "ep_a2a_1_2_probe../victim"])
def test_an_offer_names_a_file_of_its_kind_only(name, tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    victims = [tmp_path / "victim", folder / "victim"]
    for victim in victims:
        victim.write_text("kept")
    monkeypatch.setattr(facts, "SHM_DIRECTORY", folder)
    offer = facts._Offer(str(victims[0]) if name.startswith("/") else name, b"kept")
    facts._remove(offer)
    assert [victim.read_text() for victim in victims] == ["kept", "kept"]
    assert facts._try_to_open(offer) == "not the name of an offered file"


def test_a_probe_is_opened_and_removed():
    offer = facts._make_offer()
    assert facts._try_to_open(offer) == ""
    facts._remove(offer)
    assert facts._try_to_open(offer) == "No such file or directory"


OFFER_AND_DIE = """
import pathlib, sys
from ep_a2a.topology import facts
facts.SHM_DIRECTORY = pathlib.Path(sys.argv[1])
facts._make_offer()
"""


def test_the_probe_of_a_dead_process_is_removed(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-c", OFFER_AND_DIE, str(tmp_path)], check=True)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(host_shm, "SHM_DIRECTORY", tmp_path)
    host_shm.remove_stale_files()
    assert list(tmp_path.iterdir()) == []


HOLD_A_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, 1)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_rank_whose_lock_another_process_holds_has_a_record_of_its_own():
    """A rank of another job that shares the store and the host, or one whose end was not seen yet."""
    store = torch.distributed.HashStore()
    first = HostRecord.join(store, 0, 2)
    command = [sys.executable, "-c", HOLD_A_LOCK, str(first._path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        second = HostRecord.join(store, 1, 2)
        second.append({"joined": 1})
        assert second.new_lines() == [{"joined": 1}]
        assert first.new_lines() == []
        other.stdin.close()
    for record in (first, second):
        record.close()
