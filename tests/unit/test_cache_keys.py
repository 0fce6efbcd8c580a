"""The same kernel has the same key in Triton's disk cache, in whatever order a process compiles its kernels.

Triton 3.9 sees to that by itself; Triton 3.6 does not.
"""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterable
from types import ModuleType

import ep_a2a.kernels
from ep_a2a.kernels.portable import PortableFunction


def all_functions() -> dict[str, PortableFunction]:
    """Every function of ep_a2a/kernels, by the place of its definition."""
    found = {}
    for module in pkgutil.iter_modules(ep_a2a.kernels.__path__, "ep_a2a.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, PortableFunction):
                found[f"{value.fn.__module__}.{value.fn.__name__}"] = value
    return found


def keys_in_order(functions: Iterable[tuple[str, PortableFunction]]) -> dict[str, str]:
    """The keys, as a process finds them that has compiled nothing yet."""
    functions = list(functions)
    for _, function in functions:
        function.hash = None
        function.used_global_vals = {}
    return {name: function.cache_key for name, function in functions}


def test_keys_do_not_depend_on_the_order() -> None:
    functions = list(all_functions().items())
    assert len(functions) > 200
    assert keys_in_order(functions) == keys_in_order(reversed(functions))


def test_constants_are_in_the_keys() -> None:
    """Triton takes those that a function names without their module."""
    for name, function in all_functions().items():
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function.fn)))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = function.fn.__globals__.get(node.value.id)
                if isinstance(module, ModuleType) and module.__name__.startswith("ep_a2a"):
                    used = getattr(module, node.attr)
                    assert isinstance(used, PortableFunction | type), f"{name} uses {ast.unparse(node)}"
