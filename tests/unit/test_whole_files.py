"""Where files are written: whole, under the wanted name, and through no link that another user has planted."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from ep_a2a import path_security, whole_files
from ep_a2a.commands.plan.model import read_model
from ep_a2a.config.file import read_config_file
from ep_a2a.errors import ConfigError, UntrustedFolderError
from ep_a2a.telemetry.trace import write_trace
from ep_a2a.whole_files import resolved, write_whole

ANOTHER_USER = 12345
READERS = {"config file": read_config_file, "model": read_model}
CONTENTS = {"TOML": b"a = " + b"[" * 100_000, "JSON": b"[" * 100_000, "digits": b"9" * 6000, "not UTF-8": b"\xff"}
PLACES = ("pipe", "folder", "none", "a\0b", "/dev/zero", "large", *CONTENTS)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def belongs_to_another(monkeypatch):
    """Lets a path belong to another user, whoever runs the test."""

    def give(path):
        kept, own = os.lstat(path), os.geteuid()
        monkeypatch.setattr(path_security, "ROOT_USER", own)
        inode = kept.st_dev, kept.st_ino
        check = whole_files.require_trusted

        def require_trusted(where, status):
            if (status.st_dev, status.st_ino) == inode:
                fields = list(status)
                fields[stat.ST_UID] = ANOTHER_USER
                status = os.stat_result(fields)
            check(where, status)

        monkeypatch.setattr(whole_files, "require_trusted", require_trusted)

    return give


def test_a_new_file_has_the_permissions_of_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", b"text")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_bytes() == b"text"
    assert mode_of(tmp_path / "new") == 0o640
    assert os.listdir(tmp_path) == ["new"]


def test_a_file_keeps_its_permissions_and_an_own_link_leads_to_it(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to("file")
    write_whole(link, b"text")
    assert link.is_symlink()
    assert (file.read_text(), mode_of(file)) == ("text", 0o600)


def test_an_error_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fchmod", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "file", b"text")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("use", [whole_files.check_can_write, lambda path: write_whole(path, b"text")])
@pytest.mark.parametrize("where", ["{}", "{}/inside"])
def test_a_link_of_another_user_is_refused(tmp_path, belongs_to_another, use, where):
    victim = tmp_path / "victim"
    if where == "{}":
        victim.write_text("kept")
    else:
        victim.mkdir()
    link = tmp_path / "link"
    link.symlink_to(victim)
    (tmp_path / "own").symlink_to(link)
    belongs_to_another(link)
    for path in (link, tmp_path / "own"):
        with pytest.raises(UntrustedFolderError, match=f"got lrwxrwxrwx of user {ANOTHER_USER}"):
            use(tmp_path / where.format(path))
    assert victim.read_text() == "kept" if where == "{}" else not os.listdir(victim)
    assert sorted(os.listdir(tmp_path)) == ["link", "own", "victim"]


def test_traces_are_written_in_the_same_way(tmp_path, belongs_to_another):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.mkdir()
    link.symlink_to(victim)
    belongs_to_another(link)
    with pytest.raises(UntrustedFolderError):
        write_trace({0: []}, link / "new" / "trace.json")
    assert not os.listdir(victim)


def test_links_that_never_end(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels"):
        resolved(tmp_path / "one")


def test_resolved_is_what_the_system_finds(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "to_b").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "a" / "up").symlink_to("../to_b")
    monkeypatch.chdir(tmp_path)
    for path in ("x", "a/up/../x", "to_b/x/y", "./a/./up", "a/up/../../../x", str(tmp_path / "to_b")):
        assert resolved(whole_files.Path(path)) == whole_files.Path(path).resolve()


@pytest.mark.parametrize("is_theirs", [False, True])
def test_a_pipe_is_written_to_unless_it_is_planted(tmp_path, belongs_to_another, is_theirs):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    came = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_bytes()))
    reader.start()
    if is_theirs:
        belongs_to_another(pipe)
        with pytest.raises(UntrustedFolderError, match="got prw"):
            whole_files.check_can_write(pipe)
        with pytest.raises(UntrustedFolderError, match="got prw"):
            write_whole(pipe, b"secret")
    else:
        write_whole(pipe, b"text")
    reader.join()
    assert came == [b"" if is_theirs else b"text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_planted_link_to_a_pipe_of_ones_own_is_refused(tmp_path, belongs_to_another):
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / "link"
    link.symlink_to("pipe")
    belongs_to_another(link)
    for write in (whole_files.check_can_write, lambda path: write_whole(path, b"secret")):
        with pytest.raises(UntrustedFolderError, match="got lrwx"):
            write(link)


def test_the_standard_output_is_a_file_like_others():
    program = (
        "import pathlib, ep_a2a.whole_files as f; path = pathlib.Path('/dev/stdout'); "
        "f.check_can_write(path); f.write_whole(path, b'text')"
    )
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert found.stdout == b"text"


@pytest.mark.parametrize(
    ("reader", "place"),
    [(reader, place) for reader in READERS for place in PLACES if reader != "text" or place not in [*CONTENTS][:3]],
)
def test_a_file_that_cannot_be_read_is_named_in_one_error(tmp_path, monkeypatch, reader, place):
    monkeypatch.setattr(whole_files, "MAX_READ_BYTES", 1 << 20)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b" " * ((1 << 20) + 1))
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        READERS[reader](tmp_path / place)
    assert place.replace("\0", "\\x00") in caught.value.expected
    assert len(caught.value.got) < 300
    assert "\n" not in caught.value.got


def test_a_number_of_many_digits_is_named_by_its_key(tmp_path):
    file = tmp_path / "backend.toml"
    file.write_text(f"all2all_backend = 0x{'f' * 6000}")
    with pytest.raises(ConfigError, match=r"all2all_backend in .* to be a name; got int of very many digits"):
        read_config_file(file)
