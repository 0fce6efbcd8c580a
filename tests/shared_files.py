"""Which files of this package stand in shared memory, and whose they are."""

from pathlib import Path

from ep_a2a.memory import private_files


def shared_files() -> dict[str, Path]:
    """Path by name of each file of this user. Folders are those of pools of ranks, which may live."""
    if not private_files.SHM_DIRECTORY.is_dir():
        return {}
    return {path.name: path for path in private_files.private_folder().iterdir() if not path.is_dir()}


def process_of(name: str) -> str:
    """The number of the process that made a file: <namespace>_<process>_<random>."""
    return name.split("_")[1]


def files_of(*processes: int) -> list[str]:
    """Names of files that these processes made."""
    return [name for name in shared_files() if process_of(name) in map(str, processes)]
