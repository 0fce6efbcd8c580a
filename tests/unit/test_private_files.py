"""Files of shared memory are this user's alone, and what a name points to elsewhere is not opened."""

import errno
import os
import stat

import pytest

from ep_a2a.errors import UntrustedFolderError
from ep_a2a.memory.private_files import create_private, open_private

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
