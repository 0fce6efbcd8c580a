"""Checks of an op's arguments. All of them run on the host, before anything is launched."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ep_a2a.config import (
    ALIGNMENT_BYTES,
    FP8_DTYPE,
    INTERNODE_TRANSPORTS,
    EpDispatchCombineConfig,
    EpDispatchCombineKernelType,
    Layout,
)
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import (
    ClosedError,
    ContiguityError,
    DeviceError,
    DtypeError,
    ForeignIndicesError,
    HiddenSizeError,
    InputError,
    ShapeError,
    StateError,
    TooManyTokensError,
    TopKError,
    UnsupportedError,
    shown,
)
from ep_a2a.kernels.layout import WORD_BYTES
from ep_a2a.kernels.ring_shape import BY_PUTS
from ep_a2a.memory.arena import Arena
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.ops.bounds import StepTokens, by_rank

INT32 = torch.iinfo(torch.int32)
SCALE_DTYPES = {1: (torch.uint8, torch.float8_e8m0fnu), 4: (torch.float32, torch.int32)}
"""Dtypes of scales by their bytes. The first is the dtype of scales that this package computes."""


def check_construction(config: EpDispatchCombineConfig, arena: Arena | None, index: int | None) -> None:
    """Raise if this rank cannot build an op.

    Args:
        config: the op's.
        arena: where its memory comes from; None if it will be made for the op.
        index: its place there; None for one of its own.

    Raises:
        UnsupportedError: the kernel or the transport is not to be had here.
        ConfigError: the index is none.
        ClosedError, StateError: the arena has been closed, or a living op has this place.
    """
    transport = config.internode_transport
    if config.kernel_type is EpDispatchCombineKernelType.IntraNodeLL:
        raise UnsupportedError(
            "another kernel_type",
            "IntraNodeLL",
            "Use IntraNode, which takes few tokens the fast way by itself (flagged_max_tokens).",
        )
    between_nodes = config.kernel_type is not EpDispatchCombineKernelType.IntraNode
    by_host = INTERNODE_TRANSPORTS[transport] is not None
    if between_nodes and (by_host or transport == BY_PUTS) and not config.uses_rings:
        raise UnsupportedError(
            f"internode_transport 'peer_memory' with {config.kernel_type.name}",
            repr(transport),
            f"Use InterNodeV1, which {'exchanges' if by_host else 'puts'}.",
        )
    if index is not None and not (arena is not None and arena.is_unshared(index)):
        checked_integer("index", index, 0)
    if arena is None:
        return
    if arena.closed:
        raise ClosedError("an open arena", "a closed one")
    if between_nodes and by_host and arena.between_nodes is None:
        raise UnsupportedError(
            f"an arena that exchanges blocks between nodes, with internode_transport {transport!r}",
            type(arena).__name__,
            "Get the op from a manager, which makes the arena.",
        )
    if index is not None and (config.digest(), index) in arena.users:
        raise StateError(
            f"no living op of this config and index {index} in the arena",
            "one that has not been closed",
            "Use that op, close it first, or give this one another index.",
        )


def check_tensor(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Check the type, dtype, device and contiguity of an argument, and that it has memory, which holds its values.

    Raises:
        DtypeError, DeviceError, ContiguityError, InputError: the tensor does not fit.
    """
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} to be a tensor", type(tensor).__name__)
    if tensor.dtype not in dtypes:
        raise DtypeError(f"{name} of dtype {' or '.join(map(str, dtypes))}", str(tensor.dtype))
    if tensor.device != device:
        raise DeviceError(f"{name} on {device}", str(tensor.device), f"Pass {name}.to({str(device)!r}).")
    if not tensor.is_contiguous():
        raise ContiguityError(f"{name} to be contiguous", f"shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    if tensor.is_neg():
        raise InputError(
            f"{name} to hold its values", "a view that torch negates lazily", f"Pass {name}.resolve_neg()."
        )
    address_of(name, tensor)


_FAR = 1 << 40
"""An address from here on is one of real memory, and needs no further look. The storage of a tensor without memory
begins at 0, so its address is at most its offset in the storage, and no offset is as large as 1 TiB."""


def address_of(name: str, tensor: torch.Tensor) -> int:
    """The tensor's address, for kernels to read. Raise InputError if the tensor has elements and no memory."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # torch.func's tensors have none to ask for
        address = 0
    # a view without memory lies at its offset; asking for that takes longer than all of the above
    if address < _FAR and address <= tensor.storage_offset() * tensor.itemsize and tensor.numel():
        raise InputError(
            f"{name} with memory",
            "a tensor without, as torch.func's transforms, FakeTensorMode and torch.compile's tracing make them",
            "Call it outside of them, or wrap the exchange in a torch.library.custom_op.",
        )
    return address


def signature(*tensors: object) -> Hashable:
    """A key of dtypes, devices, shapes and memory layout. An object that is no tensor makes it equal to no other."""
    found: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            found.append(None)
        elif isinstance(tensor, torch.Tensor):
            found += (tensor.dtype, tensor.device, tensor.shape, tensor.is_contiguous() and not tensor.is_neg())
        else:
            found.append(object())
    return tuple(found)


def check_integer(name: str, value: int) -> None:
    """Raise InputError unless the value is an int that fits into 32 bits; a bool is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 31) <= value < 1 << 31:
        raise InputError(f"{name} to be an integer of 32 bits", shown(value))


def check_tag(tag: int) -> None:
    """Raise InputError unless the value is an int from 0 to 2**31 - 1."""
    check_integer("tag", tag)
    if tag < 0:
        raise InputError("a tag of at least 0", str(tag))


def check_rows(name: str, tensor: torch.Tensor, hidden_dim: int) -> None:
    """Check the shape [rows, H] and the alignment for 16-byte accesses."""
    if tensor.dim() != 2:
        raise ShapeError(f"{name} of 2 dimensions", f"shape {tuple(tensor.shape)}")
    if tensor.shape[1] != hidden_dim:
        raise HiddenSizeError(f"{name} of hidden size {hidden_dim}", str(tensor.shape[1]))
    check_alignment(name, tensor)


def check_alignment(name: str, tensor: torch.Tensor) -> None:
    """Check the alignment for 16-byte accesses."""
    address = address_of(name, tensor)
    if address % ALIGNMENT_BYTES and tensor.numel():
        raise ContiguityError(
            f"{name} to start at a multiple of {ALIGNMENT_BYTES} bytes",
            f"address {address:#x}",
            f"Pass {name}.clone().",
        )


def check_dispatch_addresses(tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Check the alignment of a dispatch's tensors."""
    check_alignment("input", tokens)
    if scales is None or scales.itemsize != 1 or scales.shape[-1] % WORD_BYTES or not scales.numel():
        return
    # lines of whole words are moved as words
    if scales.data_ptr() % WORD_BYTES:
        raise ContiguityError(
            f"scales to start at a multiple of {WORD_BYTES} bytes",
            f"address {scales.data_ptr():#x}",
            "Pass scales.clone().",
        )


def check_outside(places: tuple[range, ...], **tensors: torch.Tensor | None) -> None:
    """Raise InputError if a tensor lies in dispatch's result, where peers may write the next step's rows already."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        address = address_of(name, tensor)
        for addresses in places:
            if address in addresses and tensor.numel():
                raise InputError(
                    f"{name} outside of what dispatch returned, which peers overwrite with the next step",
                    "an overlap",
                    f"Copy it before combine (clone), or pass memory of your own as {name}.",
                )


def in_int32(ids: Any) -> Any:
    """Returns int64 ids as int32, those outside of int32 as another dropped slot; anything else as it is.

    Raises:
        InputError: int64 ids have elements and no memory.
    """
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64:
        return ids
    address_of("indices", ids)  # torch would read them
    return ids.clamp(INT32.min, INT32.max).to(torch.int32)


def check_dispatch(config: EpDispatchCombineConfig, device: torch.device, step: Step) -> None:
    """Check the arguments of a dispatch, as far as the host can."""
    tokens, weights, scales, indices = step.tokens, step.weights, step.scales, step.ids
    dtypes = (config.data_type, FP8_DTYPE) if config.casts_in_dispatch else (config.data_type,)
    check_tensor("input", tokens, dtypes, device)
    check_rows("input", tokens, config.hidden_dim)
    num_tokens = tokens.shape[0]
    step_tokens = checked_bounds(config, step.step_tokens)
    check_integer("pad_id", step.pad_id)
    check_tag(step.tag)
    own = by_rank(config, step_tokens)[config.rank]
    if num_tokens > own:
        raise TooManyTokensError(f"at most {own} tokens (step_tokens)", str(num_tokens))
    check_tensor("indices", indices, (torch.int32,), device)
    _check_topk("indices", indices, num_tokens, config.topk)
    if weights is not None:
        check_tensor("weights", weights, (torch.float32,), device)
        _check_topk("weights", weights, num_tokens, config.topk)
    elif config.layout == Layout.EXPERT_MAJOR:
        raise InputError("weights with layout expert_major, where combine multiplies by them", "none")
    _check_scales(config, device, tokens, scales)


def checked_bounds(config: EpDispatchCombineConfig, step_tokens: StepTokens) -> StepTokens:
    """Returns step_tokens, a sequence as a tuple.

    Raises:
        InputError: it is neither an integer above 0 nor one integer from 0 on for each rank.
        TooManyTokensError: a bound is above M.
    """
    bounds: tuple[int, ...]
    if isinstance(step_tokens, Sequence) and not isinstance(step_tokens, str):
        bounds = tuple(step_tokens)
        if len(bounds) != config.world_size:
            raise InputError(
                f"step_tokens as one integer, or {config.world_size}, one for each rank", f"{len(bounds)} of them"
            )
        if config.masks and len(set(bounds)) > 1:
            # where rows of the living lie would follow from the bound that a masked rank has told
            raise UnsupportedError(
                "one step_tokens for all ranks with on_rank_loss='mask'",
                f"{bounds}",
                f"Pass step_tokens={max(bounds)}, or make the op with on_rank_loss='fail'.",
            )
        least = 0
    else:
        bounds, least = (step_tokens,), 1
    for bound in bounds:
        check_integer("step_tokens", bound)
        if bound < least:
            raise InputError(f"step_tokens of at least {least}", str(step_tokens))
        if bound > config.max_num_inp_token_per_rank:
            raise TooManyTokensError(
                f"step_tokens <= max_num_inp_token_per_rank = {config.max_num_inp_token_per_rank}", str(step_tokens)
            )
    return bounds if least == 0 else step_tokens


def travelling_scales(
    config: EpDispatchCombineConfig, tokens: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor | None:
    """The scales for the kernels, after check_dispatch; None if the caller's empty tensor stands for none.

    A rank without tokens that come cast has an empty tensor, because its kernels move other ranks' scales.
    """
    is_cast = config.casts_in_dispatch and tokens.dtype == FP8_DTYPE
    if scales is None and is_cast and config.num_scales:
        return tokens.new_empty(0, config.num_scales, dtype=SCALE_DTYPES[config.scale_bytes][0])
    if scales is None or scales.numel() or (config.num_scales and (is_cast or not config.casts_in_dispatch)):
        return scales
    return None


def scales_travel(config: EpDispatchCombineConfig, scales: torch.Tensor | None) -> bool:
    """Whether scales travel with a step's tokens; scales: from travelling_scales, also the one of a given cast."""
    return config.num_scales > 0 and (config.casts_in_dispatch or scales is not None)


def _check_scales(
    config: EpDispatchCombineConfig, device: torch.device, tokens: torch.Tensor, scales: torch.Tensor | None
) -> None:
    will_cast = config.casts_in_dispatch and tokens.dtype != FP8_DTYPE
    if scales is not None and not isinstance(scales, torch.Tensor):
        raise DtypeError("scales to be a tensor or None", type(scales).__name__)
    if will_cast and config.takes_scale:
        if scales is None:
            raise InputError("the scale of the cast fp8_static as scales, float32 of one element", "none")
        check_tensor("scales", scales, (torch.float32,), device)
        if scales.numel() != 1:
            raise ShapeError("scales of one element, the scale of the cast fp8_static", str(tuple(scales.shape)))
        return
    # MORI's callers pass an empty tensor for no scales
    if scales is None or (scales.numel() == 0 and (will_cast or not config.num_scales)):
        if config.casts_in_dispatch and config.num_scales and not will_cast and tokens.shape[0]:
            raise InputError("scales with tokens that are quantised already", "none", "Pass scales [T, S].")
        return
    if will_cast or not config.num_scales:
        unknown = "fp8_static sends none" if config.takes_scale else "the config has scale_dim 0"
        why = "dispatch computes them" if will_cast else unknown
        raise InputError(f"no scales, because {why}", f"scales of shape {tuple(scales.shape)}", "Pass None.")
    check_tensor("scales", scales, SCALE_DTYPES[config.scale_bytes], device)
    if tuple(scales.shape) != (tokens.shape[0], config.num_scales):
        raise ShapeError(f"scales of shape {(tokens.shape[0], config.num_scales)}", str(tuple(scales.shape)))


def _check_topk(name: str, tensor: torch.Tensor, num_tokens: int, topk: int) -> None:
    if tensor.dim() != 2 or tensor.shape[0] != num_tokens:
        raise ShapeError(f"{name} of shape {(num_tokens, topk)}", str(tuple(tensor.shape)))
    if tensor.shape[1] != topk:
        raise TopKError(f"{name} with {topk} experts per token", str(tensor.shape[1]))


def check_combine(
    config: EpDispatchCombineConfig,
    device: torch.device,
    args: CombineArguments,
    lead: tuple[int, ...],
    num_tokens: int,
) -> None:
    """Check combine's rows, weights and ids, as far as the host can.

    Args:
        args: the arguments of combine.
        lead: leading dimensions of dispatch's tokens: (R,), (W, step_tokens) or (E, R).
        num_tokens: T of the dispatch.
    """
    rows, weights, indices = args.rows, args.weights, args.ids
    check_tensor("input", rows, (config.combined_dtype,), device)
    if rows.dim() == 3 and tuple(rows.shape[:2]) != lead:
        raise ShapeError(f"input of shape {(*lead, config.hidden_dim)}", str(tuple(rows.shape)))
    flat = rows.flatten(0, -2) if rows.dim() == 3 else rows
    check_rows("input", flat, config.hidden_dim)
    num_rows = math.prod(lead)
    if flat.shape[0] != num_rows:
        raise ShapeError(
            f"input with one row per row that dispatch returned, {num_rows}",
            str(flat.shape[0]),
            "Pass all rows, also those past total_recv; their content does not matter.",
        )
    if weights is not None:
        if config.layout == Layout.EXPERT_MAJOR:
            raise InputError("no weights in combine with layout expert_major: dispatch has kept them", "weights")
        check_tensor("weights", weights, (torch.float32,), device)
        if tuple(weights.shape) not in {(num_rows, config.topk), (*lead, config.topk)}:
            raise ShapeError(
                f"weights in the order of the received rows, {(*lead, config.topk)}",
                str(tuple(weights.shape)),
                "Pass the weights that dispatch returned, or None; not this rank's own topk_weights.",
            )
    if indices is None:
        return
    check_tensor("indices", indices, (torch.int32,), device)
    if tuple(indices.shape) != (num_tokens, config.topk):
        raise ForeignIndicesError(
            f"this rank's own ids, of shape {(num_tokens, config.topk)}", str(tuple(indices.shape))
        )


def check_token_rows(
    config: EpDispatchCombineConfig, device: torch.device, num_tokens: int, **tensors: torch.Tensor | None
) -> None:
    """Check arguments of combine that have a row per token, `out` and the biases: None, or [T, H] of combine_dtype."""
    for name, rows in tensors.items():
        if rows is None:
            continue
        check_tensor(name, rows, (config.combined_dtype,), device)
        check_rows(name, rows, config.hidden_dim)
        if rows.shape[0] != num_tokens:
            raise ShapeError(f"{name} with a row for each of the {num_tokens} tokens dispatched", str(rows.shape[0]))


def check_apart(name: str, tensor: torch.Tensor, region: torch.Tensor, region_name: str) -> None:
    """Raise InputError if a tensor overlaps `region`; the error calls it `region_name`."""
    first = address_of(name, tensor)
    last = first + tensor.numel() * tensor.itemsize
    region_first = region.data_ptr()
    if first < region_first + region.numel() * region.itemsize and region_first < last:
        raise InputError(
            f"{name} outside of {region_name}", "an overlap", f"Pass {name}.clone(), or memory of your own."
        )


def check_same_or_apart(name: str, bias: torch.Tensor, result: torch.Tensor) -> None:
    """Raise InputError if a bias overlaps the first rows of `result` without being them.

    A row is read and written by one program, so that a bias may be the result itself. Rows that are shifted against
    each other are written before they are read.
    """
    if 0 < abs(bias.data_ptr() - result.data_ptr()) < bias.numel() * bias.itemsize:
        raise InputError(
            f"out and {name} to be the same memory or apart",
            "a partial overlap",
            f"Pass {name}.clone(), or another out.",
        )
