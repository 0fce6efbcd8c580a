"""The shape of atom.utils.tbo.ubatching; see shape/README.md."""

from atom.config import get_current_atom_config

running: int | None = None
"""The half of an overlapped batch that runs; ATOM knows it by thread."""


def tbo_enabled():
    config = get_current_atom_config()
    return config is not None and config.enable_tbo


def tbo_active():
    return running is not None


def tbo_current_ubatch_id():
    return running or 0
