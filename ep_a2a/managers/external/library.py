"""What backends on other projects' libraries share: libraries, managers, ops, and results in this package's terms."""

from __future__ import annotations

import abc
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import MissingPackageError, UnsupportedError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import CombineResult, DispatchResult
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.capabilities import Capabilities, device_problem
from ep_a2a.memory.guards import outside_modes
from ep_a2a.ops.adapter import AdapterOp
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.ops.config_agreement import agree_on_config
from ep_a2a.routing import count_ids
from ep_a2a.topology import Topology

OWN_PACKAGE = "ep_a2a"


@dataclass(frozen=True)
class Library:
    """A Python package that a backend needs.

    Attributes:
        module: name of the imported module.
        distribution: name of the package in registries; its metadata has the version.
        install: how to install it, for errors.
        least_version: the lowest version with all that is called; "" for any.
        needs: attributes, "module:name" or "module" below `module`, that must exist.
    """

    module: str
    distribution: str
    install: str
    least_version: str = ""
    needs: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """The installed version; None without package metadata."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def problem(self) -> str | None:
        """Returns why the library cannot be used on this machine, None if it can. Imports it; cached per process.

        A module of this package under the library's name (`ep_a2a.compat.mori.install()`) is not the library. It may
        come and go, so each call looks for it. A manager on this package's own modules needs a Library that names them,
        `Library("ep_a2a", ...)`.
        """
        return self.stand_in_problem() or _problem(self)

    def stand_in_problem(self) -> str | None:
        """Returns a sentence if a module of this package has the library's name in this process; imports nothing."""
        found = getattr(sys.modules.get(self.module), "__name__", "")
        if self.module.partition(".")[0] == OWN_PACKAGE or found.partition(".")[0] != OWN_PACKAGE:
            return None
        return f"{self.module} is {OWN_PACKAGE}'s own stand-in in this process, {found}, not the library"

    def load(self, name: str = "") -> Any:
        """Returns the module `module[.name]`.

        Raises:
            MissingPackageError: it is not installed, too old, or cannot be imported; the error says which.
        """
        self.require()
        return importlib.import_module(f"{self.module}.{name}" if name else self.module)

    def require(self) -> None:
        """Raises MissingPackageError if the library cannot be used; see `load`."""
        problem = self.problem()
        if problem is not None:
            remedy = f"To install it: {self.install}."
            if self.stand_in_problem() is not None:
                remedy = f"Choose the backend 'ep_a2a', or call ep_a2a.compat.uninstall({self.module!r}). {remedy}"
            raise MissingPackageError(f"the package {self.distribution} (import {self.module})", problem, remedy)


@functools.cache
def _problem(library: Library) -> str | None:
    if importlib.util.find_spec(library.module) is None:
        return f"{library.distribution} is not installed"
    version = library.version
    found = f"{library.distribution} {version or 'of unknown version'}"
    if version and library.least_version and _numbers(version) < _numbers(library.least_version):
        return f"{found} is installed, and {library.least_version} or later is needed"
    for need in ("", *library.needs):
        submodule, _, name = need.partition(":")
        full = f"{library.module}.{submodule}" if submodule else library.module
        try:
            module = importlib.import_module(full)
            missing = bool(name) and not hasattr(module, name)
        except Exception as error:  # noqa: BLE001  a broken library may raise anything, and it is reported
            return f"{found} is installed, but import {full} raised {type(error).__name__}: {error}"
        if missing:
            return f"{found} is installed, and has no {full}.{name}"
    return None


def _numbers(version: str) -> list[int]:
    """Returns the leading numbers of a version, for comparisons."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in leading[0].split(".")] if leading else []


EXPERT_ROWS = Capabilities(
    layouts=("expert_major",),
    row_order="any",
    ids="none",
    weights_applied_by="combine",
    source_positions="no",
    weight_sums=False,
    dispatch_casts=("none", "fp8_per_1x128"),
    scale_formats=("float32", "float32_power_of_two"),
    even_experts=True,
    rdma="across nodes",
)
"""Capabilities that backends share whose dispatch returns rows by expert."""


class SingleGroupGuard:
    """The group that a library was set up for in this process, for the life of it.

    Args:
        library: its name, for errors.
        by_ranks: another group of the same ranks is accepted. Without it only the first group object is, because the
            library keeps using that.
    """

    def __init__(self, library: str, *, by_ranks: bool) -> None:
        self._library, self._by_ranks = library, by_ranks
        self._group: ProcessGroup | None = None
        self._ranks: list[int] = []

    def check(self, group: ProcessGroup) -> None:
        """Raises UnsupportedError where this process cannot use the library in `group`; other ranks may be able to."""
        ranks = dist.get_process_group_ranks(group)
        if self._group is None or self._group is group or (self._by_ranks and self._ranks == ranks):
            return
        raise UnsupportedError(
            f"one process group for {self._library} in a process, that of global ranks {self._ranks}",
            f"a second one, of global ranks {ranks}",
            "Use the first group, or the backend 'ep_a2a'.",
        )

    def join(self, group: ProcessGroup, set_up: Callable[[], None]) -> None:
        """Calls `set_up` and keeps the group, unless this process has one already; see `check`."""
        if self._group is None:
            set_up()
            self._group, self._ranks = group, dist.get_process_group_ranks(group)


class LibraryAll2AllManager(All2AllManagerBase):
    """A backend on a library that the user has installed. Tokens are exchanged through ops only.

    A subclass names the library and the class of its ops, and declares its capabilities. Construction imports the
    library.

    Attributes:
        op_type: the class of the ops.
        group_guard: of a library that serves one group per process; None for other libraries.

    Raises:
        MissingPackageError: the library is not installed, too old, or cannot be imported; the error says which.
    """

    library: ClassVar[Library]
    op_type: ClassVar[type[LibraryDispatchCombineOp]]
    group_guard: ClassVar[SingleGroupGuard | None] = None

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        self.library.require()
        super().__init__(cpu_group, tcp_store_group)

    def _check(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> None:
        problem = device_problem(self.capabilities, self.device.type)
        if problem is not None:
            raise UnsupportedError(
                f"a machine for backend {self.backend!r}",
                problem,
                "Use a backend that `ep-a2a backends` has available.",
            )
        guard = self._group_guard(topology)
        if guard is not None:
            guard.check(self.cpu_group)
        super()._check(config, topology, index)

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> LibraryDispatchCombineOp:
        agree_on_config(config, self._rendezvous, index)
        guard = self._group_guard(topology)
        if guard is not None:
            guard.join(self.cpu_group, self._set_up)
        return self.op_type(self, config, topology, index)

    def _group_guard(self, topology: Topology) -> SingleGroupGuard | None:
        return self.group_guard

    def _set_up(self) -> None:
        """Sets the library up for the group, once per process, if there is a guard. Collective."""

    @classmethod
    def kernel_for(cls, num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
        """Returns the library's module, and its distribution with the version."""
        return cls.library.module, f"{cls.backend} uses {cls.library.distribution} {cls.library.version or ''}".rstrip()


class ReceivedRows(NamedTuple):
    """The rows that a library returned for a dispatch, in this package's terms.

    Attributes:
        tokens, scales: the rows, and the scales of quantised ones.
        ids: int32 global ids, pad_id in rows without a token; None if the library returns none.
        weights: float32, in the order of the rows; None if the library returns none.
        per_source: int32 [W], rows from each source; None if the library does not say.
        per_expert: int32 [E], rows of each expert in layout expert_major.
        total: int32 [1], all rows, where neither count says it.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    per_source: torch.Tensor | None = None
    per_expert: torch.Tensor | None = None
    total: torch.Tensor | None = None


class LibraryDispatchCombineOp(AdapterOp):
    """An op on a library's native object. The manager's capabilities list how it differs from EpDispatchCombineOp.

    Args:
        manager: the backend's. Its refusals have been checked against the config.
        config: shapes and choices.
        topology: nodes of the group.
        index: ops of different indices use memory apart from each other.
    """

    @outside_modes()
    def __init__(
        self, manager: LibraryAll2AllManager, config: EpDispatchCombineConfig, topology: Topology, index: int
    ) -> None:
        super().__init__(config, manager.device)
        self.backend, self.capabilities = manager.backend, manager.capabilities
        # a source position is source rank * W * M + token
        self._position_stride = config.world_size * config.max_num_inp_token_per_rank
        # of the step in progress: the library's handle, and the ids as the library was given them
        self._handle: Any = None
        self._sent_ids: torch.Tensor | None = None
        self._expert_recv_count = torch.zeros_like(self._local_expert_count)
        self._no_weights = torch.zeros(
            config.max_num_inp_token_per_rank, config.topk, dtype=torch.float32, device=self.device
        )
        self._native: Any = self._allocated(manager, topology, index)

    def _some_weights(self, step: Step) -> torch.Tensor:
        """The step's weights, or zeros for a library that wants some where none are given."""
        return self._no_weights[: step.num_tokens] if step.weights is None else step.weights

    @abc.abstractmethod
    def _allocated(self, manager: LibraryAll2AllManager, topology: Topology, index: int) -> Any:
        """Allocates all that the op needs beside its counts, and returns the library's object. Collective."""

    @abc.abstractmethod
    def _exchange_rows(self, step: Step) -> ReceivedRows:
        """Dispatches by the library."""

    def _send(self, step: Step) -> DispatchResult:
        got, config = self._exchange_rows(step), self.config
        if got.per_source is not None:
            self._recv_counts.copy_(got.per_source)
        per_expert = got.per_expert
        if per_expert is not None:
            self._expert_recv_count.copy_(per_expert)
        elif step.counts_experts and got.ids is not None:
            per_expert = count_ids(got.ids, config.first_expert, config.num_local_experts)
        if step.counts_experts and per_expert is not None:
            self._local_expert_count.copy_(per_expert)
        counts = next(each for each in (got.total, got.per_source, got.per_expert) if each is not None)
        self._total_recv.copy_(counts.sum(0, keepdim=True))
        weights = None if step.weights is None else got.weights
        # None where the library does not say which tokens came
        return DispatchResult(got.tokens, weights, got.scales, cast("torch.Tensor", got.ids), self._total_recv)

    def _check_weights(self, weights: torch.Tensor | None) -> None:
        if weights is not None and not self.capabilities.weight_sums:
            raise self._unsupported("sums of weights in combine")

    def _combine_result(
        self, result: torch.Tensor, args: CombineArguments, sums: torch.Tensor | None = None
    ) -> CombineResult:
        """The library's own result, or `out` with a copy of it; and the sums of weights."""
        out = args.out
        return CombineResult(result if out is None else out.copy_(result[: out.shape[0]]), sums)

    def _positions(self) -> torch.Tensor:
        raise self._unsupported("source positions of received rows")

    def _unsupported(self, ability: str) -> UnsupportedError:
        return UnsupportedError(
            f"a backend with {ability}",
            f"{self.backend!r}, which has none",
            "Use the backend 'ep_a2a'; `ep-a2a backends` shows what each can do.",
        )

    def _abandon(self, step: Step) -> None:
        # Libraries count their steps on the device: a dispatch that is not combined would spoil the next one.
        rows = torch.zeros(*step.lead, self.config.hidden_dim, dtype=self.config.combined_dtype, device=self.device)
        self._bring_back(step, CombineArguments(rows, None, None))

    @property
    def recv_counts(self) -> torch.Tensor:
        """Rows received from each source in the last dispatch, int32 [W], fixed address."""
        if not self.capabilities.recv_counts:
            raise self._unsupported("counts of received rows by source")
        return self._recv_counts

    @property
    def expert_recv_count(self) -> torch.Tensor:
        """Rows of each local expert in the last dispatch of layout expert_major, int32 [E], fixed address."""
        if "expert_major" not in self.capabilities.layouts:
            raise self._unsupported("layout expert_major")
        return self._expert_recv_count

    @outside_graphs
    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """The source of each received row: int32 [total_recv], source rank * (W * M) + token. Synchronises.

        Must be called between dispatch and combine.

        Raises:
            UnsupportedError: the library does not say.
        """
        return self._positions()

    def set_timeout(self, timeout_secs: float) -> None:
        """Raises UnsupportedError: a library has its own time-outs, or none."""
        raise self._unsupported("waits that this package bounds")

    def _close(self) -> None:
        """Gives the library's object back. Collective."""
        self._destroy()
        self._native = self._handle = self._sent_ids = None

    def _destroy(self) -> None:
        """Frees resources that the library keeps when its object is deleted. Called once."""
