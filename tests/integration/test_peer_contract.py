"""Calls of MORI and FlashInfer in the managers, against the sources in their wheels, which are not imported."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

import pytest

from ep_a2a.managers.external.flashinfer import ONE_SIDED, TWO_SIDED
from ep_a2a.managers.external.mori import LIBRARY as MORI
from ep_a2a.ops.op import EpDispatchCombineOp
from tests.peer_contract.calls import attributes_of, calls_of
from tests.peer_contract.python_source import field_defaults, find, instance_attributes, signature_of
from tests.signatures.reader import load, read_mori
from tests.wheels import DOWNLOAD_TIMEOUT_SECS, Release, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(DOWNLOAD_TIMEOUT_SECS)

RELEASES = {
    "mori": Release("amd-mori", "1.2.4", ("mori/",), (".py", ".hpp")),
    "flashinfer": Release("flashinfer-python", "0.7.2.post1", ("flashinfer/comm/",)),
}
MORI_OPS, MORI_SHMEM = "mori/ops/dispatch_combine.py", "mori/shmem/api.py"
ONE, TWO = "flashinfer/comm/trtllm_moe_alltoall.py", "flashinfer/comm/trtllm_alltoall.py"
MAPPING, MNNVL = "flashinfer/comm/mapping.py", "flashinfer/comm/mnnvl.py"

# what is called: (file, definition, names of the positional arguments)
CALLS: dict[str, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "mori": {
        # its arguments come from native_fields: tests/unit/test_mori_signatures.py
        "mori.ops.EpDispatchCombineConfig": ("", "", ()),
        "mori.ops.EpDispatchCombineOp": (MORI_OPS, "EpDispatchCombineOp", ("config",)),
        "mori.shmem.shmem_torch_process_group_init": (MORI_SHMEM, "shmem_torch_process_group_init", ()),
        "self._native.dispatch": (MORI_OPS, "EpDispatchCombineOp.dispatch", ()),
        "self._native.combine": (MORI_OPS, "EpDispatchCombineOp.combine", ()),
        "self._native.get_dispatch_src_token_pos": (MORI_OPS, "EpDispatchCombineOp.get_dispatch_src_token_pos", ()),
    },
    "flashinfer": {
        "NativeMapping": (MAPPING, "Mapping", ()),
        "MnnvlConfig": (MNNVL, "MnnvlConfig", ()),
        "MoeAlltoAll": (ONE, "MoeAlltoAll", ("mapping", "max_num_tokens", "top_k", "num_experts")),
        "moe_a2a_get_workspace_size_per_rank": (
            ONE,
            "moe_a2a_get_workspace_size_per_rank",
            (
                "ep_size",
                "max_num_tokens",
                "total_dispatch_payload_size_per_token",
                "combine_payload_size_per_token",
            ),
        ),
        "moe_a2a_sanitize_expert_ids": (
            ONE,
            "moe_a2a_sanitize_expert_ids",
            ("expert_ids", "workspace", "metainfo", "ep_rank", "invalid_expert_id"),
        ),
        "self._native.dispatch": (
            ONE,
            "MoeAlltoAll.dispatch",
            ("token_selected_experts", "input_payloads", "runtime_max_tokens_per_rank"),
        ),
        "self._native.combine": (ONE, "MoeAlltoAll.combine", ("payload", "runtime_max_tokens_per_rank")),
        "self._native.get_combine_payload_tensor_in_workspace": (
            ONE,
            "MoeAlltoAll.get_combine_payload_tensor_in_workspace",
            ("runtime_max_tokens_per_rank", "hidden_size", "dtype"),
        ),
        "native._WORKSPACE_CACHE.values": ("", "", ()),  # a dictionary's method
        "native._reset_workspace": (ONE, "MoeAlltoAll._reset_workspace", ()),
        "MnnvlMemory.initialize": (MNNVL, "MnnvlMemory.initialize", ()),
        "native.get_moe_workspaces": (TWO, "MnnvlMoe.get_moe_workspaces", ()),
        "native.get_moe_prepare_workspace": (TWO, "MnnvlMoe.get_moe_prepare_workspace", ()),
        "self._native.mnnvl_moe_alltoallv_prepare_without_allgather": (
            TWO,
            "MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather",
            (),
        ),
        "self._native.mnnvl_moe_alltoallv": (TWO, "MnnvlMoe.mnnvl_moe_alltoallv", ()),
        "self._native.mnnvl_moe_alltoallv_combine": (TWO, "MnnvlMoe.mnnvl_moe_alltoallv_combine", ()),
    },
}


@cache
def _found(name: str) -> Path | Unavailable:
    try:
        return RELEASES[name].folder()
    except Unavailable as problem:
        return problem


def sources(name: str) -> Path:
    """The Python files of a release."""
    found = _found(name)
    if isinstance(found, Unavailable):
        pytest.skip(str(found))
    return found


def test_moris_wheel_is_as_pinned() -> None:
    """Public names and enumerations, as tests/signatures/mori.json has them."""
    pinned = load("mori")
    folder = sources("mori")
    assert RELEASES["mori"].version == pinned["version"]
    assert read_mori(folder) == {name: pinned[name] for name in ("modules", "enums")}


@pytest.mark.parametrize("module", CALLS)
def test_every_call_fits(module: str) -> None:
    folder = sources(module)
    calls = calls_of(module)
    assert set(calls) == set(CALLS[module])
    for spelled, made in calls.items():
        file, name, positional = CALLS[module][spelled]
        if not file:
            continue
        signature = signature_of(folder / file, name)
        for call in made:
            assert signature.positional[: call.num_positional] == positional, spelled
            assert signature.problem(call.num_positional, call.keywords) == "", spelled
            if signature.num_returned is not None:
                assert call.num_taken in (None, signature.num_returned), spelled


def test_moris_op_has_the_arguments_of_ours_in_its_order() -> None:
    for method in ("dispatch", "combine"):
        theirs = signature_of(sources("mori") / MORI_OPS, f"EpDispatchCombineOp.{method}").positional
        ours = getattr(EpDispatchCombineOp, method)
        assert ours.__code__.co_varnames[1 : len(theirs) + 1] == theirs


def test_what_moris_arguments_mean() -> None:
    """The sentences that the manager's choices rest on."""
    path = sources("mori") / MORI_OPS
    combine = " ".join((find(path, "EpDispatchCombineOp.combine").body[0].value.value).split())  # type: ignore[attr-defined]
    assert "``indices`` is this rank's own [num_token, topk] routing" in combine
    config = " ".join((find(path, "EpDispatchCombineConfig").body[0].value.value).split())  # type: ignore[attr-defined]
    for sentence in (
        "max_num_inp_token_per_rank: Maximum number of input tokens each rank can process.",
        "num_experts_per_rank: Number of local experts hosted on each rank.",
        "max_token_type_size: Maximum size in bytes for the token element type.",
    ):
        assert sentence in config


def test_what_is_read_of_flashinfers_objects_is_there() -> None:
    folder = sources("flashinfer")
    read = {"workspace", "metainfo", "ep_rank", "_WORKSPACE", "_WORKSPACE_CACHE"}
    info = {"recv_rank_count_cumsum"}
    assert attributes_of("flashinfer") == {"native": read, "self._handle": info}
    assert read <= instance_attributes(folder / ONE, "MoeAlltoAll")
    assert "recv_rank_count_cumsum" in field_defaults(folder / TWO, "MoEAlltoallInfo")


def test_flashinfers_backend_has_what_the_workspace_asks_of_it() -> None:
    folder = sources("flashinfer")
    assert "TorchDistBackend" in (folder / MNNVL).read_text()
    split = signature_of(folder / "flashinfer/comm/comm_backend.py", "TorchDistBackend.Split")
    assert split.positional == ("color", "key")


@pytest.mark.parametrize("library", [MORI, ONE_SIDED, TWO_SIDED], ids=lambda each: f"{each.module}-{each.needs[-1]}")
def test_what_a_library_must_have_to_count_as_usable_is_there(library) -> None:
    folder = sources(library.module)
    for need in library.needs:
        module, _, name = need.partition(":")
        base = folder / library.module / module.replace(".", "/")
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        text = file.read_text()
        # mori.shmem takes all names of its module api
        assert name in text or ("from .api import *" in text and name in (base / "api.py").read_text())


def test_flashinfers_workspaces_are_for_one_set_of_ranks_per_process() -> None:
    """What makes the managers refuse a second group: nothing of the group decides which workspace is taken."""
    folder = sources("flashinfer")
    get_workspace = find(folder / ONE, "MoeAlltoAll.get_workspace")
    (key,) = (
        ast.unparse(node.value)
        for node in ast.walk(get_workspace)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "key"
    )
    assert key == "(workspace_size_per_rank, ep_rank, ep_size, max_num_tokens, eplb_stats_num_experts, backend)"
    two_sided = ast.unparse(find(folder / TWO, "MnnvlMoe.get_moe_workspaces"))
    assert "if MnnvlMoe.moe_workspace is not None:" in two_sided
    assert "assert mapping == MnnvlMoe.moe_mapping" in two_sided
    # whoever has answered this before does not meet the others of a new group for it
    met = ast.unparse(find(folder / MNNVL, "MnnvlMemory._resolve_fabric_support"))
    kept = "if MnnvlMemory._fabric_supported is not None:\n        return MnnvlMemory._fabric_supported"
    assert kept in met
    assert met.index(kept) < met.index("all_ranks_agree(comm, local_supported)")
