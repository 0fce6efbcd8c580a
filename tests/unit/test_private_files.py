"""Files of shared memory are this user's alone, whatever another user plants there or a peer makes up."""

import errno
import os
import stat
import subprocess
import sys

import pytest
import torch

from ep_a2a.errors import UntrustedFolderError
from ep_a2a.memory import host_record, private_files
from ep_a2a.memory.host_record import HostRecord
from ep_a2a.memory.private_files import create_private, open_private
from ep_a2a.topology import facts

NUM_BYTES = 64
NEEDS_ROOT = "needs root, to act as another user"


@pytest.fixture
def open_to_all():
    """Files are created with the mode that the program asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_to_all")
def test_only_this_user_can_open_a_file(tmp_path):
    descriptor = create_private(tmp_path / "file", NUM_BYTES)
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    os.close(descriptor)
    os.close(open_private(tmp_path / "file", NUM_BYTES))


def test_a_link_is_not_followed(tmp_path):
    """The file behind the link is as private as it must be, so that only the link can be what is refused."""
    os.close(create_private(tmp_path / "file", NUM_BYTES))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic") as caught:
        open_private(tmp_path / "link", NUM_BYTES)
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize(
    ("mode", "num_bytes", "user"),
    [
        (0o640, NUM_BYTES, None),
        (0o620, NUM_BYTES, None),
        (0o604, NUM_BYTES, None),
        (0o600, NUM_BYTES - 1, None),
        pytest.param(0o600, NUM_BYTES, 65534, marks=pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)),
    ],
)
def test_a_file_that_no_rank_of_this_user_can_have_made_is_refused(tmp_path, mode, num_bytes, user):
    os.close(create_private(tmp_path / "file", num_bytes))
    (tmp_path / "file").chmod(mode)
    if user is not None:
        os.chown(tmp_path / "file", user, user)
    with pytest.raises(UntrustedFolderError, match="that only user"):
        open_private(tmp_path / "file", NUM_BYTES)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The name of this user's folder, in a shared memory where nobody has made it yet."""
    monkeypatch.setattr(private_files, "SHM_DIRECTORY", tmp_path)
    return tmp_path / f"ep_a2a_{os.geteuid()}"


@pytest.mark.usefixtures("open_to_all")
def test_the_folder_is_made_for_this_user_alone(planted):
    assert private_files.private_folder() == private_files.private_folder() == planted
    assert stat.S_IMODE(planted.stat().st_mode) == 0o700


def plant_link(planted):
    own = planted.with_name("own")
    own.mkdir(mode=0o700)
    planted.symlink_to(own)


def plant_open_folder(planted):
    planted.mkdir()
    planted.chmod(0o770)


def refused():
    """Runs what uses the folder; the texts of the errors."""
    uses = [
        lambda: HostRecord.join(torch.distributed.HashStore(), 0, 2),
        facts.make_offer,
        lambda: private_files.open_private(private_files.in_private_folder("name"), 0),
    ]
    texts = []
    for use in uses:
        with pytest.raises(UntrustedFolderError) as caught:
            use()
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("plant", [plant_link, plant_open_folder, lambda planted: planted.touch(0o600)])
def test_what_only_looks_like_the_folder_is_refused(plant, planted):
    plant(planted)
    before = list(planted.parent.rglob("*"))
    for text in refused():
        assert f"expected a folder {planted} that only user {os.geteuid()} can enter" in text
    private_files.remove_stale_files()
    assert list(planted.parent.rglob("*")) == before


def test_a_folder_of_another_user_is_refused(planted, monkeypatch):
    planted.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    planted.rename(planted.with_name("ep_a2a_12345"))
    for text in refused():
        assert f"got drwx------ of user {os.getuid()}" in text


@pytest.mark.parametrize("name", ["../victim", "/victim", "..", "victim/..", "", "nul\0", "long" * 100, None])
def test_a_name_that_a_peer_makes_up_stays_in_the_folder(name, planted):
    victim = planted.with_name("victim")
    victim.touch(0o600)
    assert facts.try_to_open({"file": name, "failure": ""}) != ""
    private_files.remove_private(name)
    assert victim.exists()
    assert private_files.private_folder().is_dir()
    store = torch.distributed.HashStore()
    store.set(f"host/{host_record.host_identity()}/0", str(name))
    HostRecord.join(store, 0, 2).close()


def test_a_probe_is_opened_and_removed():
    offer = facts.make_offer()
    assert facts.try_to_open(offer) == ""
    private_files.remove_private(offer["file"])
    assert facts.try_to_open(offer) == "No such file or directory"


OFFER_AND_DIE = """
import pathlib, sys
from ep_a2a.memory import private_files
from ep_a2a.topology import facts
private_files.SHM_DIRECTORY = pathlib.Path(sys.argv[1])
facts.make_offer()
"""


def test_the_probe_of_a_dead_process_is_removed(planted):
    subprocess.run([sys.executable, "-c", OFFER_AND_DIE, str(planted.parent)], check=True)
    assert len(list(planted.iterdir())) == 1
    private_files.remove_stale_files()
    assert list(planted.iterdir()) == []


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
    command = [sys.executable, "-c", HOLD_A_LOCK, str(private_files.in_private_folder(first._name))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        second = HostRecord.join(store, 1, 2)
        second.append({"joined": 1})
        assert second.new_lines() == [{"joined": 1}]
        assert first.new_lines() == []
        other.stdin.close()
    for record in (first, second):
        record.close()
