"""Adds what nvidia-smi knows beyond the driver library: links between GPUs, free memory, MIG."""

from __future__ import annotations

import re
from dataclasses import replace

from ep_a2a.commands.doctor.system_info import Driver, Gpu
from ep_a2a.commands.programs import command_output

QUERY = ("name", "driver_version", "memory.total", "memory.free", "mig.mode.current", "compute_mode")
MIB = 1 << 20
_UNDERLINE = re.compile(r"\x1b\[\d*m")


def add_nvidia_smi(driver: Driver) -> Driver:
    """Returns the description with what nvidia-smi adds; unchanged where there is no nvidia-smi."""
    listed = read_query(command_output("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))
    if not listed:
        return driver
    version, gpus = listed
    links = read_links(command_output("nvidia-smi", "topo", "-m"))
    seen = driver.gpus
    # nvidia-smi numbers all GPUs of the host, CUDA the visible ones: the numbers match only where the counts do.
    if len(seen) == len(gpus):
        seen = tuple(
            replace(one, free_bytes=other.free_bytes, mig=other.mig, compute_mode=other.compute_mode)
            for one, other in zip(seen, gpus)
        )
    elif not seen:
        seen = gpus
    return replace(driver, version=version, gpus=seen, num_gpus_of_host=len(gpus), links=links)


def read_query(text: str) -> tuple[str, tuple[Gpu, ...]] | None:
    """Driver version and GPUs from the lines of `nvidia-smi --query-gpu`; None where it lists none."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(QUERY)]
    if not rows:
        return None
    return rows[0][1], tuple(
        Gpu(
            name=row[0],
            total_bytes=_mebibytes(row[2]),
            free_bytes=_mebibytes(row[3]),
            mig=row[4] == "Enabled",
            compute_mode=row[5],
        )
        for row in rows
    )


def read_links(text: str) -> tuple[tuple[str, ...], ...]:
    """The matrix of `nvidia-smi topo -m` among GPUs; "X" is a GPU itself."""
    lines = [[cell.strip() for cell in _UNDERLINE.sub("", line).split("\t")] for line in text.splitlines()]
    header = next((line for line in lines if "GPU0" in line), [])
    columns = [place for place, name in enumerate(header) if re.fullmatch(r"GPU\d+", name)]
    rows = [line for line in lines if re.fullmatch(r"GPU\d+", line[0]) and len(line) > max(columns, default=0)]
    return tuple(tuple(row[place] for place in columns) for row in rows)


def _mebibytes(text: str) -> int | None:
    return int(text) * MIB if text.isdecimal() else None
