"""Strips releases of FlashInfer to what its all-to-all needs, for a GPU machine without a network.

    python tools/flashinfer_kit.py 0.7.4 0.7.2.post1

makes .kit/flashinfer-VERSION.tar.gz: the modules that importing it loads, the sources and headers of its kernels, and
TVM-FFI for Python 3.12 on x86-64. There, with nvcc, torch, cuda-bindings, ninja and the small packages of FlashInfer's
requirements:

    tar xzf .kit/flashinfer-0.7.4.tar.gz -C /tmp
    export PYTHONPATH=/tmp/flashinfer-0.7.4 FLASHINFER_CUDA_ARCH_LIST=9.0a

Here torch must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_kit import pip

KIT = Path(__file__).resolve().parent.parent / ".kit"
HERE = (
    "apache-tvm-ffi",
    "cuda-bindings",
    "einops",
    "filelock",
    "nvidia-ml-py",
    "packaging",
    "requests",
    "tabulate",
    "tqdm",
)
THERE = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
THERE += [part for minor in (28, 24, 17) for part in ("--platform", f"manylinux_2_{minor}_x86_64")]
LISTED = """
import importlib.util, json, pathlib, sys
from flashinfer.jit import comm, env
split = "flashinfer.moe_ep.backends.split.comm"
importlib.import_module("flashinfer.comm.mnnvl")
for sides in ("one", "two"):
    importlib.import_module(f"{split}.nvlink_{sides}_sided.communication")
    # loaded when they are used first
    if importlib.util.find_spec(f"{split}.nvlink_{sides}_sided.kernels"):
        importlib.import_module(f"{split}.nvlink_{sides}_sided.kernels")
for name in ("trtllm_alltoall", "trtllm_moe_alltoall"):
    if (pathlib.Path(comm.__file__).parents[1] / "comm" / f"{name}.py").exists():
        importlib.import_module(f"flashinfer.comm.{name}")
names = ("moe_alltoall", "comm_alltoall", "nvlink_one_sided_alltoall", "nvlink_two_sided_alltoall")
specs = [getattr(comm, f"gen_{each}_module")() for each in names if hasattr(comm, f"gen_{each}_module")]
modules = [each.__file__ for name, each in sys.modules.items() if name.split(".")[0] == "flashinfer"]
folders = [env.FLASHINFER_INCLUDE_DIR, env.FLASHINFER_CSRC_DIR, env.SPDLOG_INCLUDE_DIR]
folders += [*env.CUTLASS_INCLUDE_DIRS]
folders += [folder for spec in specs for folder in spec.extra_include_dirs or ()]
# headers of the CUDA toolkit include these, too, so all of them go along
sources = [path for folder in env.CCCL_INCLUDE_DIRS for path in folder.rglob("*") if path.is_file()]
sources += [source for spec in specs for source in spec.sources]
print(json.dumps([[str(path) for path in paths if path] for paths in (modules, sources, folders)]))
"""
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)


def listed(*path: Path) -> list[list[Path]]:
    """Modules, sources of kernels, and folders of headers of the FlashInfer on a path."""
    known = {"PYTHONPATH": os.pathsep.join(map(str, path)), "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "CUDA_HOME": "/none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LISTED], env=os.environ | known, check=True, stdout=subprocess.PIPE
    )
    return [[Path(each).resolve() for each in paths] for paths in json.loads(done.stdout.splitlines()[-1])]


def with_headers(sources: list[Path], folders: list[Path]) -> set[Path]:
    """The sources, and the headers below the folders that they include."""
    found: set[Path] = set()
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for angled, quoted in INCLUDE.findall(path.read_text(encoding="utf-8", errors="replace")):
            near = [path.parent] if quoted else []
            candidates = [folder / (angled or quoted) for folder in (*near, *folders)]
            waiting += [each.resolve() for each in candidates if each.is_file()][:1]
    return found


def make(version: str, work: Path) -> Path:
    """Makes the kit of a release; returns its archive."""
    name = f"flashinfer-{version}"
    kit, full = work / "kit" / name, (work / "full").resolve()
    pip("download", "--no-deps", "--dest", str(work), f"flashinfer-python=={version}")
    pip("download", "--no-deps", *THERE, "--dest", str(work), "apache-tvm-ffi<0.2")
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(full if wheel.name.startswith("flashinfer") else kit)
    modules, sources, folders = listed(full, work / "here")
    metadata = [path for path in full.glob("*.dist-info/*") if path.name == "METADATA"]
    for path in {*modules, *metadata, *with_headers(sources, folders)}:
        target = kit / path.relative_to(full)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    KIT.mkdir(exist_ok=True)
    return Path(shutil.make_archive(str(KIT / name), "gztar", work / "kit", name))


def main() -> None:
    """Makes the kits that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+")
    for version in parser.parse_args().versions:
        with tempfile.TemporaryDirectory(prefix="flashinfer_kit_") as name:
            work = Path(name)
            pip("install", "--target", str(work / "here"), *HERE)
            kit = make(version, work)
            print(f"{kit}: {kit.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
