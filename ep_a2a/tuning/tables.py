"""Reads, searches and writes the tables of tuned launch numbers in configs/.

A table is a JSON file `{arch}_intra_node_ep{ranks}_{phase}.json`: shape keys, the launch that was fastest for each, and
the measurement that says so. Its numbers are wishes: the policy gives no more programs than there is work or room for.
Ranks may have different tables: nothing in a launch's numbers must match on other ranks.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ep_a2a import env
from ep_a2a.config import QuantType
from ep_a2a.errors import ConfigError
from ep_a2a.tuning.parse import parse_table
from ep_a2a.whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ep_a2a.config import EpDispatchCombineConfig

PHASES = ("bulk_dispatch", "low_latency_dispatch", "combine")
"""Values of policy.Phase; each has a table of its own."""
NO_TABLES = "none"
"""Value of EP_A2A_TUNING_DIR for no tables at all, not even the shipped ones."""
MAX_RATIO = 2.0
"""Entries whose max_num_tokens or hidden_dim is off by more than this factor are not used: at four times its tokens an
entry was 4 % slower than the analytic numbers (bench/results)."""
ABOUT = (
    "us is a whole round trip, dispatch + combine in a CUDA graph, median, slowest rank; gb_per_s is what the round "
    "trip must move over the wire, remote_rows of a rank times the bytes of a row on both ways, over us. "
    "A number of programs, senders or receivers of 0 means one for each unit of work, "
    "with max_sms what follows from it."
)
_log = logging.getLogger(__name__)
_reported: set[tuple[str, ShapeKey, str]] = set()


@dataclass(frozen=True, order=True)
class ShapeKey:
    """Shape that a launch was tuned for.

    Attributes:
        hidden_dim: H. topk: K.
        cast: the cast of the phase's wire ("fp8_per_1x128", ...), or where there is none the dtype ("bfloat16").
        max_num_tokens: bound on every rank's tokens in a step, the same on all ranks.
        max_sms: bound on the multiprocessors of a launch; 0 = all.
    """

    hidden_dim: int
    topk: int
    cast: str
    max_num_tokens: int
    max_sms: int = 0


@dataclass(frozen=True)
class TunedLaunch:
    """Launch numbers of one phase; see policy.Launch. 0 programs, senders or receivers: one for each unit of work.

    `dispatch` has num_programs, the other phases have num_senders and num_receivers, `combine` has the rest as well;
    numbers that a phase does not have are 0. Of an entry with max_sms the policy takes num_warps and, of a combine,
    num_senders (0 for its own number) and send_rows; the rest follows from the bound.
    """

    num_warps: int
    num_programs: int = 0
    num_senders: int = 0
    num_receivers: int = 0
    send_elements: int = 0
    add_elements: int = 0
    pause_ns: int = 0
    send_rows: int = 1


@dataclass(frozen=True)
class Evidence:
    """The measurement behind an entry.

    Attributes:
        us: microseconds of a round trip.
        gb_per_s: 1e9 bytes per second of a rank's remote rows, both ways, over `us`.
        remote_rows: rows that a rank sends to others in dispatch (and has back in combine), one per token and rank.
        device: name of the GPUs. versions: of torch and triton. date: year-month-day.
        note: anything else, alternatives that were slower, say.
    """

    us: float
    gb_per_s: float
    remote_rows: int
    device: str
    versions: Mapping[str, str]
    date: str
    note: str = ""


@dataclass(frozen=True)
class TableEntry:
    """One line of a table; `origin` is the file it came from, for people."""

    key: ShapeKey
    launch: TunedLaunch
    evidence: Evidence
    origin: str = field(default="", compare=False)


Table = tuple[TableEntry, ...]
"""The entries of one phase, one per key, in the order in which they count at equal distance."""


class Found(NamedTuple):
    """An entry, and its source in words."""

    entry: TableEntry
    reason: str


def lookup(table: Table, key: ShapeKey) -> Found | None:
    """Returns the entry for a shape: the exact one, else the nearest, else None.

    Nearest means of the same cast and max_sms, of the same hidden_dim (else of the nearest), and then nearest in
    max_num_tokens by the distance of logarithms; of two at equal distance the one with the same topk, then the larger.
    Nothing further than MAX_RATIO is taken.
    """
    distances = []
    for entry in table:
        other = entry.key
        if other == key:
            return Found(entry, f"tuned table {entry.origin}, exact")
        hidden = _ratio(other.hidden_dim, key.hidden_dim)
        tokens = _ratio(other.max_num_tokens, key.max_num_tokens)
        if (other.cast, other.max_sms) == (key.cast, key.max_sms) and max(hidden, tokens) <= MAX_RATIO:
            distances.append(((hidden, tokens, other.topk != key.topk, -other.max_num_tokens), entry))
    if not distances:
        return None
    entry = min(distances, key=lambda item: item[0])[1]
    where = str(entry.key.max_num_tokens)
    for name in ("hidden_dim", "topk"):
        if getattr(entry.key, name) != getattr(key, name):
            where += f" of {name} {getattr(entry.key, name)}"
    return Found(entry, f"tuned table {entry.origin}, nearest: {where}")


def _ratio(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


class TunedTables:
    """The tables that one op's launches are looked up in, by phase.

    Args:
        tables: by value of policy.Phase; phases without one have analytic launches.
    """

    def __init__(self, tables: Mapping[str, Table] | None = None) -> None:
        self._tables = dict(tables or {})

    def find(self, config: EpDispatchCombineConfig, phase: str, max_num_tokens: int, max_sms: int = 0) -> Found | None:
        """Returns the entry that `lookup` finds for a step of an op."""
        return lookup(self._tables.get(phase, ()), shape_key(config, phase, max_num_tokens, max_sms))

    def log_source(self, config: EpDispatchCombineConfig, phase: str, max_num_tokens: int, reason: str) -> None:
        """Logs the source of a launch, at info, once per phase, shape and source in a process."""
        source = (phase, shape_key(config, phase, max_num_tokens), reason)
        if source not in _reported:
            _reported.add(source)
            _log.info("%s of at most %d tokens per rank: launch numbers are %s", phase, max_num_tokens, reason)

    def turning_points(self) -> set[int]:
        """The values of max_num_tokens around which `find` may change its answer."""
        found = set()
        for table in self._tables.values():
            sizes = sorted({entry.key.max_num_tokens for entry in table})
            points = [float(size) for size in sizes]
            points += [(low * high) ** 0.5 for low in sizes for high in sizes if low < high]
            points += [size * factor for size in sizes for factor in (MAX_RATIO, 1 / MAX_RATIO)]
            found |= {int(point) + step for point in points for step in (-1, 0, 1, 2)}
        return found


def shape_key(config: EpDispatchCombineConfig, phase: str, max_num_tokens: int, max_sms: int = 0) -> ShapeKey:
    """Returns the key of a step; ranks agree on all of it."""
    cast, dtype = config.dispatch_quant, config.wire_dtype
    if phase == "combine":
        cast, dtype = config.combine_quant, config.combined_dtype
    name = str(dtype).removeprefix("torch.") if cast == QuantType.NONE else cast.value
    return ShapeKey(config.hidden_dim, config.topk, name, max_num_tokens, max_sms)


def arch_name(capability: tuple[int, int]) -> str:
    """Returns the name of a compute capability in file names: (9, 0) is sm_90."""
    return f"sm_{capability[0]}{capability[1]}"


def table_name(arch: str, num_ranks: int, phase: str) -> str:
    """Returns the file name of a table."""
    return f"{arch}_intra_node_ep{num_ranks}_{phase}.json"


def shipped_directory() -> Path:
    """Returns configs/: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_tables(arch: str, num_ranks: int) -> TunedTables:
    """Returns the tables for a kind of GPU and a number of ranks: those in EP_A2A_TUNING_DIR, then the shipped ones.

    Entries of the directory replace shipped ones of the same key. EP_A2A_TUNING_DIR=none: no tables.

    Raises:
        ConfigError: the directory does not exist, or a file in it is not a table.
    """
    own = env.TUNING_DIR.get()
    if own == NO_TABLES:
        return TunedTables()
    if own and not Path(own).is_dir():
        raise ConfigError(
            f"{env.TUNING_DIR.name} to be a folder, or {NO_TABLES}",
            repr(own),
            "Make it (ep-a2a tune writes tables there), or unset the variable.",
        )
    tables = {}
    for phase in PHASES:
        name = table_name(arch, num_ranks, phase)
        entries: dict[ShapeKey, TableEntry] = {}
        for path, origin in ((Path(own) / name, str(Path(own) / name)), (shipped_directory() / name, name)):
            if (own or origin == name) and path.exists():
                for entry in read_table(path, phase, origin):
                    entries.setdefault(entry.key, entry)
        tables[phase] = tuple(entries.values())
    return TunedTables(tables)


def read_table(path: Path, phase: str, origin: str | None = None) -> Table:
    """Reads the table in a file.

    Args:
        path: the file. phase: value of policy.Phase, which decides the fields of a launch.
        origin: the file's name in launch reasons; None takes its path.

    Raises:
        ConfigError: it cannot be read, or is no table; the error names the entry and the field.
    """
    return tuple(
        TableEntry(ShapeKey(**key), TunedLaunch(**launch), Evidence(**evidence), origin or str(path))
        for key, launch, evidence in parse_table(path, phase)
    )


def write_table(path: Path, phase: str, entries: Iterable[TableEntry]) -> None:
    """Writes entries into a new or existing table: entries of equal keys are replaced, others stay.

    Readers see the old file or the new one, never a part. Entries are ordered by key.

    Raises:
        ConfigError: the file exists and is no table.
        UntrustedFolderError: the path leads through a link of another user.
        OSError: the file cannot be written.
    """
    merged = {entry.key: entry for entry in read_table(path, phase)} if path.exists() else {}
    merged |= {entry.key: entry for entry in entries}
    lines = [json.dumps(_as_json(merged[key], phase)) for key in sorted(merged)]
    text = '{\n"about": ' + json.dumps(ABOUT) + ',\n"entries": [\n' + ",\n".join(lines) + "\n]\n}\n"
    write_whole(path, text.encode())
    # a file that cannot be read again would stop every op that is made afterwards
    read_table(path, phase)


def _as_json(entry: TableEntry, phase: str) -> dict[str, Any]:
    from ep_a2a.tuning.parse import LAUNCH_FIELDS

    launch = {name: getattr(entry.launch, name) for name in LAUNCH_FIELDS[phase]}
    evidence = asdict(entry.evidence)
    if not entry.evidence.note:
        del evidence["note"]
    return {"key": asdict(entry.key), "launch": launch, "evidence": evidence}
