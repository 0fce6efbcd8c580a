"""ep_a2a.compat.mori against MORI's wheel: names, order, kinds and defaults, as tests/signatures/mori.json has them."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import ep_a2a.compat.mori as mori
from ep_a2a.compat.mori import MORI_VERSION, ops
from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.errors import NotInitializedError
from ep_a2a.managers.external.mori import native_fields
from tests.signatures.reader import load

PINNED = load("mori")
CONFIG = "EpDispatchCombineConfig."
# a routing handle, which no call returns, is absent; a buffer that cannot be made has no signature
LEFT_OUT = ("EpDispatchRoutingHandle", "MoriShmemBuffer.")
NAMES = [
    (module, name, text)
    for module, names in PINNED["modules"].items()
    for name, text in names.items()
    if not name.startswith((CONFIG, *LEFT_OUT))
]
# parameters of what MORI has and this package refuses
ANYTHING = "*_, **__"
# the names of ours that stand where MORI reads its C++ extension
VALUES = {"mori_cpp.MORI_SHMEM_INIT_WITH_MPI_COMM": 0, "mori_cpp.MORI_SHMEM_INIT_WITH_UNIQUEID": 1}


def ours(module: str, name: str) -> Any:
    """What stands in mori.ops or mori.shmem, which have the names of all their modules."""
    found: Any = getattr(mori, module.partition("/")[0])
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def text_of(function: Any, keep: set[str]) -> str:
    """Its parameters as the reader writes them, without keyword-only ones that are not in `keep`."""
    signature = inspect.signature(function)
    kept = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.KEYWORD_ONLY or each.name in keep
    ]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))[1:-1]


@pytest.mark.parametrize(("module", "name", "text"), NAMES, ids=[f"{m}:{n}" for m, n, _ in NAMES])
def test_every_name_is_there_with_moris_parameters_or_value(module, name, text):
    found = ours(module, name)
    if text.startswith("field = "):
        value = text.removeprefix("field = ")
        assert found == VALUES.get(value, torch.int32)
    elif text not in ("class", "attribute"):
        assert text_of(found, keep={"routing", "return_routing"}) in (text, ANYTHING)


def test_the_pins_are_of_the_version_that_is_named():
    assert PINNED["version"] == MORI_VERSION
    assert mori.__version__.startswith(f"{MORI_VERSION}+ep_a2a.")
    assert len(NAMES) > 50


def test_the_configuration_has_moris_fields_in_its_order_with_its_defaults():
    names = PINNED["modules"]["ops/dispatch_combine"]
    pinned = [(name.removeprefix(CONFIG), text) for name, text in names.items() if name.startswith(CONFIG)]
    positional = [field for field in dataclasses.fields(EpDispatchCombineConfig) if not field.kw_only]
    assert [field.name for field in positional] == [name for name, _ in pinned]
    config = EpDispatchCombineConfig(torch.bfloat16, 0, 1, 64, 0, 0, 2, 4, 1, 1)
    assert list(native_fields(mori, config)) == [name for name, _ in pinned]
    for field, (_, text) in zip(positional, pinned):
        if field.default is dataclasses.MISSING:
            assert text == "field"
        elif isinstance(field.default, EpDispatchCombineKernelType):
            assert text == f"field = {field.default}"
        else:
            assert text == f"field = {field.default!r}"


def test_enumerations_have_moris_values():
    assert {each.name: each.value for each in EpDispatchCombineKernelType} == PINNED["enums"]["KernelType"]
    # pybind calls it None_, since None is a keyword
    quant_types = {each.name.rstrip("_"): each.value for each in ops.EpDispatchCombineQuantType}
    assert quant_types == PINNED["enums"]["QuantType"]


def test_an_op_needs_a_world():
    config = EpDispatchCombineConfig(torch.bfloat16, 0, 1, 64, 0, 1, 2, 4, 1, 1)
    with pytest.raises(NotInitializedError, match="shmem_torch_process_group_init"):
        mori.ops.EpDispatchCombineOp(config)
