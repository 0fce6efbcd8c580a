"""Compares what the kernels of two revisions compile to: the headline variants at EP 2, 4, 8, and those between nodes.

    python tools/compare_ptx.py 989da57 .                     # a git revision, or a folder with a checkout
    python tools/compare_ptx.py 989da57 . --match dispatch    # only variants whose name contains a text

Each checkout compiles through its own host code, offline for compute capability 9.0: variants are those that its op
would launch, in order. Names, places in files and labels do not count; the order of run-time arguments does. The
script prints one line per variant and exits with 1 when a variant differs, or has no partner.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator

EP_SIZES = (2, 4, 8)
GRIDS = ((2, 2), (4, 2))
"""(nodes, ranks of each) for which the kernels between nodes are compared."""
TRANSPORTS = {"rings": "auto", "puts": "nvshmem", "staged": "torch.distributed"}
"""The transports between nodes, as variants are named and as a config names them."""
FP8_DISPATCH, FP8_COMBINE = {"quant_type": "fp8_per_1x128"}, {"quant_type": "fp8_blockwise"}
FP8_GIVEN = {"data_type": "float8_e4m3fn", "scale_dim": 56, "scale_type_size": 4}
NODE_FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "cast": FP8_DISPATCH | {"layout": "compact"},
    "combine-fp8": FP8_COMBINE,
    "scales": FP8_GIVEN | {"layout": "compact"},
    "few": {"kernel_type": "InterNodeV1LL"},
}
NUM_SMS = 132
NUM_WORKERS = 2
ROLES = ("dispatch", "combine", "local")
"""What a kernel is for, as its name has it; "local" is every other one."""
MEASURES = ("registers", "stack", "instructions")
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Compiles and compares; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, metavar="REVISION_OR_FOLDER")
    parser.add_argument("--match", default="", help="only variants whose name contains this")
    parser.add_argument("--ep", type=int, action="append", choices=EP_SIZES, help="only this EP size; may be repeated")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="processes that compile")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("SHARE", "SHARES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compile_share(Path(options.checkouts[0]), Path(options.checkouts[1]), options)
        return 0
    with contextlib.ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = [stack.enter_context(checkout(name)) for name in options.checkouts]
        outputs = [output / "before", output / "after"]
        for folder, target in zip(folders, outputs):
            target.mkdir()
            run_workers(folder, target, options)
        return report(*outputs)


@contextlib.contextmanager
def checkout(name: str) -> Iterator[Path]:
    """A folder with the given revision; of a folder, itself."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), name], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def run_workers(folder: Path, target: Path, options: argparse.Namespace) -> None:
    """Compiles the variants of a checkout, in processes that import its code."""
    num_workers = options.workers
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(folder), str(target)]
    command += ["--match", options.match]
    command += [f"--ep={size}" for size in options.ep or ()]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    workers = [
        subprocess.Popen([*command, "--worker", str(share), str(num_workers)], env=environment, cwd=folder)
        for share in range(num_workers)
    ]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"compiling {folder} failed")


def compile_share(folder: Path, target: Path, options: argparse.Namespace) -> None:
    """Compiles every so manieth variant of `folder`, whose code this process imports, into `target`."""
    import ep_a2a

    if not Path(ep_a2a.__file__).is_relative_to(folder):
        raise SystemExit(f"ep_a2a comes from {ep_a2a.__file__} instead of {folder}")

    share, shares = options.worker
    ep_sizes = options.ep or EP_SIZES
    every = (*headline_variants(ep_sizes), *node_variants(ep_sizes))
    chosen = [one for one in every if options.match in one[0]]
    for name, variant in chosen[share::shares]:
        path = target / name
        asm = compiled(variant, calls_nvshmem="-puts-" in name)
        path.with_suffix(".ptx").write_text(asm["ptx"])
        path.with_suffix(".json").write_text(json.dumps(measures(asm["cubin"])))


def compiled(variant: Any, *, calls_nvshmem: bool) -> dict[str, Any]:
    """The stages of a variant by name; calls of NVSHMEM stay open, since its bitcode need not be here."""
    from triton.backends.nvidia.compiler import CUDABackend

    from tests.offline_compile import compile_kernel

    original = CUDABackend.parse_options

    def parse(self: Any, given: dict[str, Any]) -> Any:
        return dataclasses.replace(original(self, given), ptx_options="--compile-only")

    with mock.patch.object(CUDABackend, "parse_options", parse if calls_nvshmem else original):
        return compile_kernel(variant)


def headline_variants(ep_sizes: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Those of an op inside a node, and of rings between two nodes."""
    for ep_size in ep_sizes:
        for layout in ("rank_major", "compact"):
            for label, changes, part in (
                ("bf16", {}, ROLES),
                ("cast", FP8_DISPATCH, ("dispatch",)),
                ("combine-fp8", FP8_COMBINE, ("combine",)),
            ):
                kernels = kernels_of(ep_size, layout=layout, **changes)
                yield from _named(f"ep{ep_size}-{layout}-{label}", kernels.compiled_kernels(), part)
        kernels = kernels_of(ep_size, layout="expert_major", **FP8_DISPATCH)
        yield from _named(f"ep{ep_size}-expert_major-cast", kernels.compiled_kernels(), ("local",))
        for label, changes in (("bf16", {}), ("cast", NODE_FORMS["cast"])):
            kernels = kernels_of(ep_size, "rings", gpu_per_node=ep_size // 2, **changes)
            yield from _named(f"ep{ep_size}-rings-{label}", kernels.compiled_kernels(), ROLES)


def node_variants(ep_sizes: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Those of every transport between nodes; on the smallest grid also those of every call, in halves, too."""
    for num_nodes, gpus in GRIDS:
        ep_size = num_nodes * gpus
        if ep_size not in ep_sizes:
            continue
        for transport in TRANSPORTS:
            for label, changes in NODE_FORMS.items():
                kernels = kernels_of(ep_size, transport, gpu_per_node=gpus, **changes)
                yield from _named(f"ep{num_nodes}x{gpus}-{transport}-{label}", kernels.compiled_kernels(), ROLES)
            if (num_nodes, gpus) == GRIDS[0]:
                kernels = kernels_of(ep_size, transport, gpu_per_node=gpus, compiled_calls="all")
                yield from _named(f"ep{num_nodes}x{gpus}-{transport}-every", every_variant(kernels), ROLES)


def every_variant(engine: Any) -> list[Any]:
    """The variants of whole calls and of halves, each once."""
    from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE

    found = [variant for stages in (WHOLE, SEND, RECEIVE) for variant in engine.compiled_kernels(stages)]
    return list({id(variant): variant for variant in found}.values())


def _named(prefix: str, variants: Any, roles: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The variants of these roles, by their place in the list: kernels may be renamed."""
    for place, variant in enumerate(variants):
        role = next((role for role in ROLES if role in variant.kernel.__name__), "local")
        if role in roles:
            yield f"{prefix}-{place}-{role}", variant


def kernels_of(ep_size: int, transport: str = "", **changes: Any) -> Any:
    """What launches the kernels of an op, as on a Hopper GPU; without a transport, of an op inside a node."""
    import torch

    from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
    from ep_a2a.ops.intra_node import IntraNodeEngine
    from ep_a2a.ops.rings import RingEngine
    from ep_a2a.ops.staged import StagedEngine

    values: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "rank": 0,
        "world_size": ep_size,
        "hidden_dim": 7168,
        "scale_dim": 0,
        "scale_type_size": 0,
        "max_token_type_size": 4,
        "max_num_inp_token_per_rank": 4096,
        "num_experts_per_rank": 256 // ep_size,
        "num_experts_per_token": 8,
        "compiled_calls": "serving",
        "layout": "rank_major",
    } | changes
    if transport:
        values["internode_transport"] = TRANSPORTS[transport]
        values["kernel_type"] = EpDispatchCombineKernelType[changes.get("kernel_type", "InterNodeV1")]
    if "data_type" in changes:
        values["data_type"] = getattr(torch, changes["data_type"])
    config = EpDispatchCombineConfig(**values)
    table = torch.zeros(64, ep_size, dtype=torch.int64)
    engine: Any
    if transport == "staged":
        # an arena, and memory bound to it, of which no launch is made
        memory = SimpleNamespace(table=table, device=table.device, rendezvous=None)
        engine = StagedEngine(config, memory, memory, None)
    else:
        engine = (RingEngine if transport else IntraNodeEngine)(config, table, table.device)
    engine.kernels.num_sms = NUM_SMS
    engine.kernels.can_depend = True
    return engine


def plain_ptx(text: str) -> str:
    """PTX without what names and places in files leave in it."""
    text = re.sub(r"^\s*\.section\s+\.debug_\w+\s*\{.*?^\s*\}", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^\s*\.(loc|file)\b.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*\$L__(tmp|func_begin|func_end)\w*:", "", text, flags=re.MULTILINE)
    entry = re.search(r"\.entry\s+(\w+)", text)
    if entry:
        text = re.sub(rf"\b{entry.group(1)}(?=\b|_param_)", "KERNEL", text)
    # labels become numbers, in the order in which they first appear
    numbers: dict[str, int] = {}
    text = re.sub(r"\$L__\w+", lambda match: f"$L{numbers.setdefault(match.group(), len(numbers))}", text)
    return "\n".join(line for line in (re.sub(r"\s+", " ", line).strip() for line in text.splitlines()) if line) + "\n"


def measures(cubin: bytes) -> dict[str, int]:
    """Registers per thread, bytes of stack, and instructions."""
    import triton

    from tests.offline_compile import resources

    with tempfile.TemporaryDirectory() as folder:
        used = resources(cubin, Path(folder))
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", Path(folder) / "kernel.cubin"]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # "/*0010*/  MOV R1, c[0x0][0x28] ;": the lines between them hold the rest of an instruction's encoding
    instructions = len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+\S", code, flags=re.MULTILINE))
    return dict(zip(MEASURES, (used["REG"], used["STACK"], instructions)))


def report(before: Path, after: Path) -> int:
    """Prints a line per variant; 1 when one differs or has no partner, else 0."""
    names = [{path.stem for path in folder.glob("*.ptx")} for folder in (before, after)]
    width = max((len(name) for name in names[0] | names[1]), default=10)
    print(f"{'variant':{width}}  equal  " + "  ".join(f"{name:>14}" for name in MEASURES))
    missing = names[0] ^ names[1]
    bad = sorted(missing)
    for name in sorted(names[0] & names[1]):
        first, second = (plain_ptx((folder / f"{name}.ptx").read_text()) for folder in (before, after))
        sizes = [json.loads((folder / f"{name}.json").read_text()) for folder in (before, after)]
        if first != second:
            bad.append(name)
        pairs = (f"{sizes[0][key]:>6} {sizes[1][key]:>7}" for key in MEASURES)
        print(f"{name:{width}}  {'yes' if first == second else 'NO':5}  " + "  ".join(pairs))
    for name in bad:
        print(f"{name}: " + ("only in one of the two" if name in missing else "differs"))
    print(f"{len(names[0] & names[1])} compared, {len(bad)} of them or without a partner differ")
    return 1 if bad or not names[0] else 0


if __name__ == "__main__":
    sys.exit(main())
