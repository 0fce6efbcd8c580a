"""The shape of atom.config; see shape/README.md."""

from dataclasses import dataclass


@dataclass
class Config:
    enable_tbo: bool = False
    enable_low_latency: bool = False
    moe_all2all_backend: str = "auto"
    moe_backend: str = "standard"


current: Config | None = None


def get_current_atom_config():
    return current
