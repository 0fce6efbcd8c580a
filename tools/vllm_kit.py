"""Strips a release of vLLM, and NCCL 2.31, to what sm_90 runs, for a GPU machine without a network.

    python tools/vllm_kit.py 0.26.0

makes .kit/vllm-VERSION.tar.xz for Python 3.12 on x86-64: vLLM without FlashAttention 2, Marlin and code for other GPUs;
the packages of its requirements that it imports at start; NCCL; the entry points by which vLLM finds this package.
There, with torch, Triton, transformers and their usual companions:

    mkdir /tmp/kit && tar xJf .kit/vllm-0.26.0.tar.xz -C /tmp/kit
    export PYTHONPATH=$PWD:/tmp/kit

LD_PRELOAD=/tmp/kit/nvidia/nccl/lib/libnccl.so.2 lets ranks of NCCL share a GPU.
"""

from __future__ import annotations

import argparse
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = Path(__file__).resolve().parent.parent
NEEDED = """
    annotated-types==0.8.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
    compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 distro==1.9.0 fastapi==0.136.3 ijson==3.6.0 jiter==0.19.0
    jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.2.2 llguidance==1.7.6 loguru==0.7.3
    mistral-common==1.13.1 msgspec==0.23.0 nvidia-nccl-cu13==2.31.2 openai==2.54.0 openai-harmony==0.0.8
    opentelemetry-api==1.45.2 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pycountry==26.2.16 pydantic==2.14.4
    pydantic-core==2.50.5 pydantic-extra-types==2.11.1 python-json-logger==4.2.0 pyzmq==27.3.0 referencing==0.37.0
    rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 starlette==1.0.1 typing-inspection==0.4.5 xgrammar==0.2.9
"""
THERE = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
THERE += [
    part for minor in (35, 34, 31, 28, 27, 24, 18, 17, 12, 5) for part in ("--platform", f"manylinux_2_{minor}_x86_64")
]
LEFT_OUT = re.compile(
    r"vllm/(vllm-rs|_qutlass|third_party/(fmha_sm100|tml_fa4))|.*/_vllm_fa2_C|.*/_C\.cpython-31[0134]|"
    r"nvidia/nccl/(?!lib/libnccl\.so)|pycountry/locales|mistral_common/data|.*/static/|.*\.(jpg|pyi)$"
)
ARCHITECTURE, CUBIN, FATBIN = 90, 2, struct.pack("<I", 0xBA55ED50)


def pip(*arguments: str) -> None:
    """Runs pip."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def strip_kernels(library: bytearray) -> None:
    """Overwrites with zeros, which compress to nothing, what of a shared library sm_90 does not load.

    That is code of other architectures, PTX, relocatable code, which is linked again in another section, and what
    debuggers read. The CUDA driver chooses by the headers, which stay.
    """
    for name, start, size in sections(library):
        if name == "__nv_relfatbin" or name.startswith(".debug"):
            library[start : start + size] = bytes(size)
        elif name == ".nv_fatbin":
            for at, num_bytes in other_code(library, start, start + size):
                library[at : at + num_bytes] = bytes(num_bytes)


def sections(library: bytearray) -> list[tuple[str, int, int]]:
    """Name, start and size in bytes of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 40)
    header_bytes, num, names = struct.unpack_from("<HHH", library, 58)
    found = [struct.unpack_from("<I20xQQ", library, table + header_bytes * number) for number in range(num)]
    ends = [library.index(0, found[names][1] + name) for name, _, _ in found]
    return [
        (library[found[names][1] + name : end].decode(), start, size) for (name, start, size), end in zip(found, ends)
    ]


def other_code(library: bytearray, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Start and bytes of each piece of a section's fat binaries that is no machine code of ARCHITECTURE."""
    while (start := library.find(FATBIN, start, end)) >= 0:
        header_bytes, num_bytes = struct.unpack_from("<6xHQ", library, start)
        start += header_bytes
        piece, start = start, start + num_bytes
        while piece < start:
            kind, own_header_bytes, payload_bytes, architecture = struct.unpack_from("<H2xIQ12xI", library, piece)
            if kind != CUBIN or architecture != ARCHITECTURE:
                yield piece + own_header_bytes, payload_bytes
            piece += own_header_bytes + payload_bytes


def unpack(wheel: Path, folder: Path, left_out: re.Pattern[str]) -> None:
    """Unpacks what is needed of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not left_out.match(name)])


def make(version: str, work: Path) -> Path:
    """Makes the kit of a release; returns its archive."""
    pip("download", "--no-deps", *THERE, "--dest", str(work), f"vllm=={version}", *NEEDED.split())
    kit = work / "kit"
    for wheel in work.glob("*.whl"):
        unpack(wheel, kit, LEFT_OUT)
    pip("wheel", "--no-deps", "--wheel-dir", str(work), str(PROJECT))
    unpack(next(work.glob("ep_a2a-*.whl")), kit, re.compile("ep_a2a/|configs/"))
    for path in kit.rglob("*.so*"):
        library = bytearray(path.read_bytes())
        strip_kernels(library)
        path.write_bytes(library)
    archive = PROJECT / ".kit" / f"vllm-{version}.tar.xz"
    archive.parent.mkdir(exist_ok=True)
    # kernels of one library resemble each other, far apart
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 64 << 20}]
    with lzma.open(archive, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as file:
        for path in sorted(kit.iterdir()):
            file.add(path, path.name)
    return archive


def main() -> None:
    """Makes the kits that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+")
    for version in parser.parse_args().versions:
        with tempfile.TemporaryDirectory(prefix="vllm_kit_") as name:
            kit = make(version, Path(name))
            print(f"{kit}: {kit.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
