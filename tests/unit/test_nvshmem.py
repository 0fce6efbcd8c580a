"""What can be known of NVSHMEM without it: the layout of its structures, and what its absence says."""

import ctypes
import sys

import pytest
import torch

from ep_a2a.errors import MissingPackageError
from ep_a2a.memory import nvshmem


def test_structures_are_those_of_version_1():
    """Sizes as NVSHMEM asserts them itself (nvshmem_types.h, nvshmem_uniqueid.h), and what stands where."""
    assert ctypes.sizeof(nvshmem._Attributes) == 144
    assert ctypes.sizeof(nvshmem._Arguments) == 128
    assert ctypes.sizeof(nvshmem._UniqueIdArguments) == 24
    assert (nvshmem._Attributes.mpi_communicator.offset, nvshmem._Attributes.arguments.offset) == (8, 16)
    assert (nvshmem._Arguments.unique_id.offset, nvshmem._Arguments.content.offset) == (8, 32)
    assert (nvshmem._UniqueIdArguments.id.offset, nvshmem._UniqueIdArguments.rank.offset) == (8, 16)
    assert nvshmem._version(nvshmem._Attributes) == 0x10000 + 144


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package nvidia-nvshmem without libraries."""
    package = tmp_path / "nvidia" / "nvshmem" / "lib"
    package.mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return package


def test_without_libraries_the_package_does_not_count(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert nvshmem.library_folder() is None
    with pytest.raises(MissingPackageError, match="no package nvidia-nvshmem") as caught:
        nvshmem.device_library(torch.device("cuda", 0))
    assert "pip install nvidia-nvshmem-cu" in caught.value.remedy


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["libnvshmem_device.bc"], "libnvshmem_device.bc"),
        (["libnvshmem_device.bc", "libnvshmem_device_sm_90.bc"], "libnvshmem_device_sm_90.bc"),
        (["libnvshmem_device_sm_100.bc"], None),
    ],
)
def test_the_device_library_is_that_of_the_gpu(files, found, folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for name in (*files, nvshmem.HOST_LIBRARY):
        (folder / name).touch()
    if found is None:
        with pytest.raises(MissingPackageError, match="none of libnvshmem_device_sm_90"):
            nvshmem.device_library(torch.device("cuda", 0))
    else:
        assert nvshmem.device_library(torch.device("cuda", 0)) == folder / found
