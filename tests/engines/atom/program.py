"""A stand-in for ATOM's server: it starts a process as ATOM does, which imports the layers' module (its shape).

Run by tests/integration/test_atom_serve.py; prints whose method the layers have there, and the arguments it got.
"""

import importlib
import importlib.util
import multiprocessing
import sys


def imported() -> str:
    """Whose method makes prepare/finalize, and whether there is a mori, in this process."""
    layers = importlib.import_module("atom.model_ops.moe")
    maker = layers.FusedMoEMethodBase._maybe_make_prepare_finalize
    return f"{maker.__module__} {importlib.util.find_spec('mori') is not None}"


def report(results) -> None:
    results.put(imported())


def main() -> None:
    # as in ATOM: a function of another module than the main one
    program = importlib.import_module("tests.engines.atom.program")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=program.report, args=(results,))
    process.start()
    child = results.get(timeout=200)
    process.join()
    lines = (f"child {child}", f"parent {imported()}", " ".join(["arguments", *sys.argv[1:]]))
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
