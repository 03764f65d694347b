"""Filling parameters from stored tensors: any part of one, read by pieces, and put on its device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from ..ops.mxfp4 import mxfp4_decode
from .names import GROUP, SCALE_SUFFIX, Parameter, Rule, Slot
from .shards import ShardReader

PIECE = 1 << 19  # values a thread handles at a time: a few MB of temporaries each
Index = tuple[slice, ...]
"""Explicit starts and stops, an axis each."""
Bounds = tuple[tuple[int, int], ...]
"""The same, to be a key."""


class Group(NamedTuple):
    """Shards that differ in their columns (in the file) only: read together, so that no byte is read twice."""

    bounds: Index
    """Of what is read: from the first column of any shard to the last."""
    shards: dict[Bounds, list[Any]]
    """The devices of each shard."""


def groups(parameter: Parameter, sharding: Sharding | None) -> list[Group]:
    """What this process reads of a parameter, and for which of its devices (None: the default device)."""
    shape = parameter.shape
    everything = tuple((0, length) for length in shape)
    if sharding is None:
        return [Group(_slices(everything), {everything: [None]})]
    shards: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = everything if index is None else tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))
        shards.setdefault(bounds, []).append(device)
    columns = _column_axes(parameter)
    together: dict[Bounds, dict[Bounds, list[Any]]] = {}
    for bounds, devices in shards.items():
        rows = tuple((0, 0) if axis in columns else part for axis, part in enumerate(bounds))
        together.setdefault(rows, {})[bounds] = devices
    return [Group(_union(members), members) for members in together.values()]


def bytes_to_fill(parameter: Parameter, dtype: np.dtype, sharding: Sharding | None) -> int:
    """What `Filler.place` will tell `advance` in all."""
    total = 0
    for group in groups(parameter, sharding):
        packed = parameter.rule.kind == "packed"
        filled = sum(slot is not None for _, slot in _slots(parameter, group.bounds))
        for bounds in _packed_bounds(group.bounds) if packed else [group.bounds]:
            size = math.prod(axis.stop - axis.start for axis in bounds[len(parameter.stack) :])
            total += filled * size * (1 if packed else dtype.itemsize)
    return total


class Filler:
    """Fills parameters from the files of one reader."""

    def __init__(
        self,
        reader: ShardReader,
        initial: dict[str, np.ndarray],
        pool: ThreadPoolExecutor,
        advance: Callable[[int], None],
    ):
        """initial: {parameter: values} for slices that no tensor fills; advance: is told the bytes done."""
        self.reader, self.initial, self.pool, self.advance = reader, initial, pool, advance

    def place(self, parameter: Parameter, dtype: np.dtype, sharding: Sharding | None) -> jax.Array:
        """The parameter on its devices, one group of shards at a time."""
        arrays: list[jax.Array] = []
        for group in groups(parameter, sharding):
            if parameter.rule.kind == "packed":
                arrays += self._decoded(parameter, group, dtype)
                continue
            value = self.fill(parameter, group.bounds, dtype)
            for bounds, devices in group.shards.items():
                part = _cut(value, _slices(bounds), group.bounds)
                arrays += [jax.device_put(part, device, may_alias=True) for device in devices]
        return arrays[0] if sharding is None else jax.make_array_from_single_device_arrays(parameter.shape, sharding, arrays)

    def _decoded(self, parameter: Parameter, group: Group, dtype: np.dtype) -> list[jax.Array]:
        """MXFP4 is moved packed and decoded on the device: a quarter of the bytes, and no work for the host."""
        whole = _packed_bounds(group.bounds)
        read = [self.fill(_stored_part(parameter, part), at, np.dtype(np.uint8)) for part, at in enumerate(whole)]
        values = []
        for bounds, devices in group.shards.items():
            inputs = bounds[-2]
            cut = (inputs[0] % GROUP, inputs[0] % GROUP + inputs[1] - inputs[0])
            pair = [_cut(*part) for part in zip(read, _packed_bounds(_slices(bounds)), whole, strict=True)]
            for device in devices:
                on_device = (jax.device_put(part, device, may_alias=True) for part in pair)
                values.append(self._initialised(parameter, _slices(bounds), _decode(*on_device, dtype=dtype, cut=cut)))
        return jax.block_until_ready(values)  # else the codes of many parameters would wait in memory

    def _initialised(self, parameter: Parameter, bounds: Index, value: jax.Array) -> jax.Array:
        """With the initial values of the experts that no tensor fills."""
        if parameter.label not in self.initial:
            return value
        stacked = len(parameter.stack)
        host = np.array(value)
        for place, slot in _slots(parameter, bounds):
            if slot is None:
                host[_inside(place, bounds)] = self.initial[parameter.label][place][bounds[stacked:]]
        return jax.device_put(host, value.sharding)

    def fill(self, parameter: Parameter, bounds: Index, dtype: np.dtype) -> np.ndarray:
        """The part of the parameter inside `bounds`, on the host."""
        out = _aligned([part.stop - part.start for part in bounds], dtype)
        stacked = len(parameter.stack)
        jobs = []
        for place, slot in _slots(parameter, bounds):
            target = out[_inside(place, bounds)]
            if slot is not None:
                jobs += [(target, slot, piece, bounds[stacked:]) for piece in pieces(slot.rule, bounds[stacked:])]
            elif parameter.label in self.initial:
                target[...] = self.initial[parameter.label][place][bounds[stacked:]]
            else:  # codes and scales of an expert that is missing: see _initialised
                target[...] = 0
        for done in self.pool.map(self._fill_piece, jobs):
            self.advance(done)
        return out

    def _fill_piece(self, job: tuple[np.ndarray, Slot, Index, Index]) -> int:
        target, slot, piece, bounds = job
        value = read_part(self.reader, slot.name, slot.rule, piece)
        inside = tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(piece, bounds, strict=True))
        _copy(target[inside], value)
        return target[inside].nbytes


def _slices(bounds: Bounds) -> Index:
    return tuple(slice(*part) for part in bounds)


def _union(members: Iterable[Bounds]) -> Index:
    return tuple(slice(min(start for start, _ in axis), max(stop for _, stop in axis)) for axis in zip(*members, strict=True))


def _cut(value: np.ndarray, bounds: Index, whole: Index) -> np.ndarray:
    """The part `bounds` of a value that covers `whole`; a copy, unless it is all of it."""
    return np.ascontiguousarray(value[tuple(slice(b.start - w.start, b.stop - w.start) for b, w in zip(bounds, whole, strict=True))])


def _column_axes(parameter: Parameter) -> set[int]:
    """The parameter's axes that lie along a row of the stored matrix."""
    rule, stacked = parameter.rule, len(parameter.stack)
    if rule.padded:  # always read whole, to check the padding
        return {stacked}
    if sum(bool(group) for group in rule.split) < 2:
        return set()
    first = len(rule.factors) - len(rule.split[-1])
    return {stacked + at for at, factor in enumerate(rule.axes) if factor >= first}


def _slots(parameter: Parameter, bounds: Index) -> Iterator[tuple[tuple[int, ...], Slot | None]]:
    """(index over the stacked axes, slot) of each slice inside `bounds`."""
    for place in itertools.product(*(range(part.start, part.stop) for part in bounds[: len(parameter.stack)])):
        yield place, parameter.slots[place]


def _inside(place: tuple[int, ...], bounds: Index) -> tuple[int, ...]:
    """An index over the stacked axes, counted from the start of `bounds`."""
    return tuple(at - part.start for at, part in zip(place, bounds, strict=False))


def _packed_bounds(bounds: Index) -> tuple[Index, Index]:
    """Of the codes and of the scales behind the part `bounds` [...,in,out] of a packed parameter, whole groups of inputs."""
    *stack, into, out = bounds
    first, last = into.start // GROUP, -(-into.stop // GROUP)
    return (*stack, out, slice(first * GROUP // 2, last * GROUP // 2)), (*stack, out, slice(first, last))


def _stored_part(parameter: Parameter, part: int) -> Parameter:
    """The codes (0) or scales (1) of a packed parameter, as a parameter of bytes [...,out,in/2] or [...,out,in/32]."""

    def stored(name: str) -> tuple[str, Rule]:
        name, spec = list(parameter.rule.stored(name, "U8").items())[part]
        rows, columns = spec.shape
        return name, Rule(name, ((rows,), (columns,)), (0, 1), kind="bytes")

    slots = {index: slot and Slot(*stored(slot.name), None) for index, slot in parameter.slots.items()}
    path = (*parameter.path, ("codes", "scales")[part])
    return Parameter(parameter.collection, path, stored("")[1], parameter.stack, slots)


@partial(jax.jit, static_argnames=("dtype", "cut"))
def _decode(codes: jax.Array, scales: jax.Array, *, dtype: Any, cut: tuple[int, int]) -> jax.Array:
    """codes [...,out,n/2], scales [...,out,n/32] -> [...,in,out], the columns `cut` of n."""
    return jnp.swapaxes(mxfp4_decode(codes, scales, dtype=dtype)[..., cut[0] : cut[1]], -1, -2)


def pieces(rule: Rule, bounds: Index) -> Iterator[Index]:
    """Cut a part of a parameter along the stored rows into pieces of about PIECE values."""
    axis = rule.axes.index(0)
    values = math.prod(part.stop - part.start for part in bounds)
    rows = bounds[axis].stop - bounds[axis].start
    step = rows if rule.padded or not values else max(1, rows * PIECE // values)
    for start in range(bounds[axis].start, bounds[axis].stop, max(1, step)):
        part = slice(start, min(start + step, bounds[axis].stop))
        yield (*bounds[:axis], part, *bounds[axis + 1 :])


def read_part(reader: ShardReader, name: str, rule: Rule, bounds: Index) -> np.ndarray:
    """The part of a parameter inside `bounds` (over its own axes) from the stored tensor `name`, in the stored dtype."""
    factors = [slice(0, size) for size in rule.factors]
    for axis, part in zip(rule.axes, bounds, strict=True):
        factors[axis] = part
    if rule.padded:
        return _read_padded(reader, name, rule, factors[0])
    if rule.window is not None:
        axis, start, _ = rule.window
        factors[axis] = slice(factors[axis].start + start, factors[axis].stop + start)
    ranges: list[tuple[int, int]] = []
    inner: list[slice] = []
    at = 0
    for group in rule.split:  # of each stored axis the rows that its first factor asks for; the other factors are cut later
        row = math.prod(group[1:])
        ranges.append((factors[at].start * row, factors[at].stop * row) if group else (0, 1))
        inner += [slice(None), *factors[at + 1 : at + len(group)]] if group else []
        at += len(group)
    block = reader.read(name, ranges)
    if name.endswith(SCALE_SUFFIX):
        check_scales(name, block)
    sizes: list[int] = []
    for group, (start, stop) in zip(rule.split, ranges, strict=True):
        sizes += [(stop - start) // math.prod(group[1:]), *group[1:]] if group else []
    return block.reshape(sizes)[tuple(inner)].transpose(rule.axes)


def _read_padded(reader: ShardReader, name: str, rule: Rule, part: slice) -> np.ndarray:
    values = reader.read(name).reshape(-1)
    assert rule.window is not None
    heads = rule.window[2]
    if np.any(values[heads:] != 0):  # NaN is refused, too
        bad = heads + int(np.flatnonzero(values[heads:] != 0)[0])
        raise ValueError(
            f"{name} holds {values[bad]} at entry {bad}; entries from {heads} on (the number of heads) are padding and must be 0. "
            "The file has other heads than its config.json says."
        )
    return values[part]


def check_scales(name: str, scales: np.ndarray) -> None:
    """Refuse scale byte 255, which means NaN (OCP MX 1.0)."""
    if np.any(scales == 255):
        raise ValueError(f"{name} holds scale byte 255 (NaN); the tensor is damaged or was written by a broken encoder.")


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """An empty array at a multiple of 64 bytes: a CPU device takes it as it is, without a second copy in memory."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count].view(dtype).reshape(shape)


def _copy(target: np.ndarray, value: np.ndarray) -> None:
    if target.dtype == value.dtype == ml_dtypes.bfloat16:  # as integers: NumPy moves them faster than a dtype it does not know
        target, value = target.view(np.uint16), value.view(np.uint16)
    target[...] = value
