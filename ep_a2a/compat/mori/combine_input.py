"""Converts the arguments of MORI's combine to those of ours."""

from typing import NamedTuple

import torch

from ep_a2a.compat.parameters import warn_once
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import DtypeError, InputError
from ep_a2a.interface import DispatchCombineOp
from ep_a2a.memory.guards import is_capturing, outside_modes
from ep_a2a.ops.arguments import Step
from ep_a2a.ops.inputs import address_of

COMBINE = "ops.EpDispatchCombineOp.combine"


class Registered(NamedTuple):
    """A registered buffer for combine's input.

    Attributes:
        owner: our op that has it, which may return other memory in each step.
        rows: [R, H], as it was last returned.
    """

    owner: DispatchCombineOp
    rows: torch.Tensor


class CombineInput:
    """Makes the arguments of our combine from those of MORI's.

    MORI reads rows up to total_recv, so its callers may pass fewer rows than dispatch returned (ATOM does). Ours takes
    as many rows as dispatch returned: shorter input is copied to a buffer of that size. MORI's kernels inside a node
    read no ids, and its documents show calls with ids and weights in another order than that of the rows: both are
    dropped here.

    Args:
        native: our op.
        config: its configuration.
        registered: the registered buffers that have been asked for, by dtype; ops of all token dtypes share them.

    Attributes:
        native: as given.
        own_weights: this rank's own topk_weights, as given to the dispatch before; None without any.
        lost_rows: whether earlier combines were given too few rows.
    """

    def __init__(
        self, native: DispatchCombineOp, config: EpDispatchCombineConfig, registered: dict[torch.dtype, Registered]
    ) -> None:
        self.native, self._config, self._registered = native, config, registered
        self.own_weights: torch.Tensor | None = None
        self.lost_rows = LostRows(native.device)
        self._rows: torch.Tensor | None = None
        self._weights: torch.Tensor | None = None

    @property
    def _step(self) -> Step | None:
        """The step whose rows have been received and not combined."""
        step = self.native.open_step
        return step if step is not None and step.next_call == "combine" else None

    def registered(self, dtype: torch.dtype, hidden_dim: int) -> torch.Tensor:
        """Returns the registered buffer for combine's input of a dtype, from the op that was first asked for it."""
        owner = self._registered[dtype].owner if dtype in self._registered else self.native
        rows = owner.get_registered_combine_input_buffer(dtype, hidden_dim)
        self._registered[dtype] = Registered(owner, rows)
        return rows

    def of(
        self, rows: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor | None, use_external_inp_buf: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns (rows, weights, indices) for our combine, which refuses those that do not fit.

        Args:
            rows, weights, indices: as given to MORI's combine.
            use_external_inp_buf: 0, 1, or -1 for the config's.

        Raises:
            InputError: rows of received tokens are missing, or weights could be in the order of rows or of tokens.
            DtypeError: combine reads a registered buffer, and none of its dtype has been asked for.
        """
        self.lost_rows.check()
        for name, tensor in (("input", rows), ("weights", weights), ("indices", indices)):
            if isinstance(tensor, torch.Tensor):
                address_of(name, tensor)
        num_rows = self._config.max_num_expert_rows
        num_given = rows.shape[0] if isinstance(rows, torch.Tensor) and rows.dim() else num_rows
        if isinstance(weights, torch.Tensor) and not weights.numel():
            weights = weights if self._are_cut_to_nothing(weights, num_given) else None
        elif self._are_own(weights, num_given):
            warn_once("mori", COMBINE, "weights")
            weights = None
        is_cut = isinstance(rows, torch.Tensor) and rows.dim() == 2 and num_given < num_rows
        if is_cut and isinstance(weights, torch.Tensor) and weights.dim() == 2 and weights.shape[0] == num_given:
            self._weights = weights = _extended(weights, num_rows, self._weights)
        if self._are_received(indices, num_given):
            warn_once("mori", COMBINE, "indices")
            indices = None
        external = self._config.use_external_inp_buf if use_external_inp_buf < 0 else bool(use_external_inp_buf)
        if not external and self._registered:
            return self._registered_rows(), weights, indices
        if not is_cut:
            return rows, weights, indices
        if (step := self._step) is not None:
            self.lost_rows.note(step.dispatched.total_recv, num_given)
        if rows.shape[1] == self._config.hidden_dim and rows.dtype == self._config.combined_dtype:
            self._rows = rows = _extended(rows, num_rows, self._rows)
        return rows, weights, indices

    def _registered_rows(self) -> torch.Tensor:
        """Returns the registered buffer of the dtype that combine takes."""
        dtype = self._config.combined_dtype
        if dtype not in self._registered:
            raise DtypeError(
                f"a registered buffer of {dtype}",
                f"one of {', '.join(map(str, self._registered))} alone",
                f"Write the rows to get_registered_combine_input_buffer({dtype}), or pass use_external_inp_buf=1.",
            )
        return self._registered[dtype].rows

    def _are_cut_to_nothing(self, weights: torch.Tensor, num_given: int) -> bool:
        """Whether empty weights are received ones, cut as the rows are on a rank that has received none.

        They travel then, as those of other ranks do. Other empty weights stand for none: beside rows, or this rank's
        own of no tokens.
        """
        step = self._step
        fits = num_given == 0 and tuple(weights.shape) == (0, self._config.topk)
        return fits and step is not None and weights is not self.own_weights

    def _are_own(self, weights: torch.Tensor | None, num_given: int) -> bool:
        """Whether weights are those of this rank's own tokens, and not in the order of the rows.

        The shape decides unless T rows are given, and the address where one of the two tensors itself is passed. For a
        copy beside T rows the values decide, for which the host waits for the GPU.

        Raises:
            InputError: the values are neither of the two, or the call is captured.
        """
        step = self._step
        if step is None or not isinstance(weights, torch.Tensor):
            return False
        own, received = self.own_weights, step.dispatched.weights
        if own is not None and weights.data_ptr() == own.data_ptr():
            return weights.shape == own.shape
        if tuple(weights.shape) != (step.num_tokens, self._config.topk):
            return False
        if step.num_tokens not in (num_given, step.dispatched.tokens.shape[0]):
            return True
        if received is not None and weights.data_ptr() == received.data_ptr():
            return False
        if not is_capturing(weights.device):
            if received is not None and _same_bits(weights, received.flatten(0, -2)[: step.num_tokens]):
                return False
            if own is not None and _same_bits(weights, own):
                return True
        raise InputError(
            "weights of combine that are those dispatch returned, or a copy of them",
            f"others for {step.num_tokens} rows, as many as this rank has tokens: they could be in the order of either",
            "Pass the weights that dispatch returned, cut to the rows, or None.",
        )

    def _are_received(self, indices: torch.Tensor | None, num_given: int) -> bool:
        """Whether ids are in the order of the received rows."""
        step = self._step
        if step is None or not isinstance(indices, torch.Tensor) or indices.dim() != 2:
            return False
        received = step.dispatched.indices
        if indices.numel() and indices.data_ptr() == received.data_ptr():
            return True
        return indices.shape[0] != step.num_tokens and indices.shape[0] in (num_given, received.shape[0])


class LostRows:
    """Notices that combine was given fewer rows than this rank has received, without waiting for a GPU.

    Args:
        device: where dispatch counts the received rows.
    """

    @outside_modes()
    def __init__(self, device: torch.device) -> None:
        self._most = torch.zeros(1, dtype=torch.int32, device=device)
        self._on_host = (
            torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True) if device.type == "cuda" else self._most
        )

    def note(self, total_recv: torch.Tensor, num_given: int) -> None:
        """Notes a combine. May be captured.

        Args:
            total_recv: int32 [1], the received rows.
            num_given: rows that combine was given.

        Raises:
            InputError: on CPU, where nothing has been launched by then.
        """
        torch.maximum(self._most, total_recv - num_given, out=self._most)
        if self._most.device.type == "cuda":
            self._on_host.copy_(self._most, non_blocking=True)
            return
        try:
            self.check()
        finally:
            self.clear()

    def check(self) -> None:
        """Raises InputError if a noted combine was given too few rows."""
        num_lost = int(self._on_host[0])
        if num_lost > 0:
            raise InputError(
                "input of combine to hold all total_recv received rows",
                f"{num_lost} rows fewer",
                "Pass one row per received row, in the order of dispatch's rows; not one per token of this rank. "
                "On GPUs the sums of the step are wrong: call reset() and repeat it.",
            )

    def clear(self) -> None:
        """Forgets all noted combines."""
        self._most.zero_()
        if self._on_host is not self._most:
            torch.cuda.synchronize(self._most.device)
            self._on_host.zero_()


def _extended(tensor: torch.Tensor, num_rows: int, buffer: torch.Tensor | None) -> torch.Tensor:
    """Returns `tensor` extended to `num_rows` rows, in `buffer` if that has the shape, dtype and device."""
    shape = (num_rows, *tensor.shape[1:])
    if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (shape, tensor.dtype, tensor.device):
        with outside_modes():
            buffer = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    buffer[: tensor.shape[0]] = tensor
    return buffer


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same float32 values, also those of rows that nobody has written."""
    alike = (one.dtype, one.device) == (other.dtype, other.device)
    return alike and torch.equal(one.view(torch.int32), other.view(torch.int32))
