"""vLLM's own tests with this backend, on GPUs.

    python tests/engines/vllm/acceptance/run.py FOLDER [PYTEST'S ARGUMENTS]

FOLDER has `tests` and `pyproject.toml` of the source distribution of the vLLM that is installed, and nothing else:

    pip install pytest setuptools-scm setuptools-rust
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.26.0 \\
      pip download --no-deps --no-build-isolation --no-binary vllm vllm==0.26.0
    tar xzf vllm-0.26.0.tar.gz --wildcards 'vllm-0.26.0/tests/*' vllm-0.26.0/pyproject.toml

Options are those of pytest, of vLLM's tests and of ep_a2a_acceptance.py: `-k TritonExperts`, `-k 2-1-True` for two
data-parallel ranks of the layer test, `--subtests ID,ID` for a few of its layers, `--rank-timeout SECS` for how long a
process may take.
"""

import sys
from pathlib import Path

import pytest

TESTS = Path("tests/kernels/moe")
MODULES = ("test_modular_kernel_combinations.py", "test_moe_layer.py")


def main(folder: str, *arguments: str) -> int:
    tests = Path(folder) / TESTS
    return pytest.main(
        [
            *("-p", "ep_a2a_acceptance", "--vllm-tests", folder, "-c", str(Path(folder) / "pyproject.toml")),
            # conftest.py of folders above imports much that these tests do not use
            *("--confcutdir", str(tests), "-p", "no:cacheprovider"),
            *arguments,
            *([] if names_a_test(arguments) else [str(tests / module) for module in MODULES]),
        ]
    )


def names_a_test(arguments: tuple[str, ...]) -> bool:
    return any(str(TESTS) in argument for argument in arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
