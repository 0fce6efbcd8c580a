"""Makes the virtual environment that the Makefile uses. Standard library only: it runs before anything is installed.

Without a GPU: torch of a fixed version (its CPU build where the package index in use has one), Triton, and the tools of
constraints.txt. With a GPU: what is installed already, if its torch sees the GPU; so a machine without a network works.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

MINIMUM_PYTHON = (3, 11)
TORCH_WITHOUT_GPU = "torch==2.13.0"
PROJECT = Path(__file__).resolve().parent.parent
CONSTRAINTS = PROJECT / "constraints.txt"
SEES_A_GPU = "import sys, torch, triton; sys.exit(not torch.cuda.is_available())"
SITE_FOLDERS = "import site, sysconfig; print('\\n'.join({sysconfig.get_path('purelib'), *site.getsitepackages()}))"
IMPORTABLE = "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))"


def run(*command: str | Path) -> None:
    """Runs a command; its failure ends this program with its exit status."""
    status = subprocess.run([str(part) for part in command], check=False).returncode
    if status:
        sys.exit(status)


def succeeds(*command: str | Path) -> bool:
    """Whether a command exits with 0; its output is dropped."""
    return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0


def borrow_packages(folder: Path) -> None:
    """Lets the environment see the packages of the Python that runs this program.

    --system-site-packages would not do when that Python lives in an environment itself.
    """
    folders = subprocess.run([sys.executable, "-c", SITE_FOLDERS], capture_output=True, text=True, check=True).stdout
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "borrowed.pth").write_text(folders)


def main() -> None:
    """Makes or completes the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="optional dependencies of the project to install")
    parser.add_argument("--borrow", action="store_true", help="use the packages of this Python, too")
    options = parser.parse_args()
    if sys.version_info < MINIMUM_PYTHON:
        sys.exit(
            f"Python >= 3.11 is needed, this is {sys.version.split()[0]}. Name another one to make, for example: "
            "make PYTHON=python3.12 demo"
        )

    python = options.environment / "bin" / "python"
    if not python.exists():
        venv.create(options.environment, with_pip=True)
    project = f"{PROJECT}[{','.join(options.extra)}]" if options.extra else str(PROJECT)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    has_gpu = succeeds(sys.executable, "-c", SEES_A_GPU)
    if not has_gpu:
        pip = (*pip, "--constraint", CONSTRAINTS)
    if not has_gpu and not options.borrow:
        run(*pip, TORCH_WITHOUT_GPU, "--editable", project)
        return
    borrow_packages(options.environment)
    # What is installed already is used; building with it, too, needs no network.
    isolation = ["--no-build-isolation"] if succeeds(python, "-c", IMPORTABLE, "setuptools", "wheel") else []
    if not succeeds(*pip, *isolation, "--editable", project):
        run(*pip, *isolation, "--no-deps", "--editable", str(PROJECT))
        print("some optional packages could not be installed; what needs them says so", file=sys.stderr)


if __name__ == "__main__":
    main()
