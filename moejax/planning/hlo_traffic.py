"""Bytes that a compiled program moves between devices, read from XLA's text (HLO) and sorted by mesh axis.

A device's bytes are those that it sends with the usual ring or pairwise algorithm, R devices in a group:
all-gather (R-1) of its part; reduce-scatter and all-to-all (R-1)/R of its operand; all-reduce twice that; permute its operand.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(\(.*?\)(?=\s[a-z])|\S+)\s+([a-z][\w\-]*)\((.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")  # "/*index=5*/" before every fifth operand
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes over which it runs; () for a group of one device."""
    operand_bytes: int
    """Of one device, one time."""
    times: int
    """How often it runs a step: the product of the counts of the loops around it. 0 in a loop of unknown count."""
    shapes: tuple[str, ...]
    """Operands, as "f32[8,16]"."""
    op_name: str
    group: int
    """Devices that take part."""

    @property
    def sent(self) -> float:
        """Bytes a device sends in a step."""
        r, x = self.group, self.operand_bytes * self.times
        share = {"all-gather": r - 1, "all-reduce": 2 * (r - 1) / r, "collective-permute": 1}
        return x * share.get(self.kind, (r - 1) / r) if r > 1 else 0.0


def read_collectives(text: str, mesh: dict[str, int]) -> list[Collective]:
    """Every collective of a compiled program (`compiled.as_text()`) on a mesh of these axis sizes, devices in its order."""
    computations, entry = _split(text)
    found: list[Collective] = []
    _visit(computations, entry, 1, mesh, found)
    return found


def bytes_by_axis(text: str, mesh: dict[str, int]) -> dict[str, float]:
    """-> {"data+fsdp": bytes a device sends a step over these axes together, ...}, largest first.

    Loops of unknown count (later rounds of an uneven expert exchange) are left out.
    """
    total: dict[str, float] = collections.defaultdict(float)
    for item in read_collectives(text, mesh):
        if item.sent:
            total["+".join(item.axes)] += item.sent
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    op: str
    rest: str


def _split(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (parts := _INSTRUCTION.match(line)):
            current.append(_Instruction(*parts.groups()))
    if not entry:
        raise ValueError("no ENTRY computation in the text; give compiled.as_text().")
    return computations, entry


def _visit(computations, name: str, times: int, mesh: dict[str, int], found: list[Collective]) -> None:
    results = {item.name: item.result for item in computations.get(name, ())}
    for item in computations.get(name, ()):
        kind = item.op.removesuffix("-start")
        if kind in KINDS:
            # The TPU compiler writes a reduce-scatter as a fusion of that name around an all-reduce and a slice.
            scattered = kind == "all-reduce" and name.startswith("all-reduce-scatter")
            found.append(_collective("reduce-scatter" if scattered else kind, item, results, times, mesh))
            continue
        inner = times
        if item.op == "while":
            inner = times * _turns(computations, item)
        for one, several in _CALLED.findall(item.rest):
            for called in [one] if one else re.findall(r"[\w.\-]+", several):
                _visit(computations, called, inner, mesh, found)


def _turns(computations: dict[str, list[_Instruction]], loop: _Instruction) -> int:
    """How often a loop turns: as the compiler notes it, or up to the constant that its condition compares with; 0: unknown."""
    if noted := _TRIPS.search(loop.rest):
        return int(noted.group(1))
    condition = _CONDITION.search(loop.rest)
    body = computations.get(condition.group(1), []) if condition else []
    constants = {item.name: item.rest.split(")")[0] for item in body if item.op == "constant"}
    if not body or body[-1].op != "compare" or "direction=LT" not in body[-1].rest:
        return 0
    limit = constants.get(_operands(body[-1])[-1], "")
    return int(limit) if limit.isdecimal() else 0


def _operands(item: _Instruction) -> list[str]:
    operands = _COMMENT.sub("", item.rest).split(")")[0]
    return [part.strip().split(" ")[-1].lstrip("%") for part in operands.split(",")]


def _collective(kind: str, item: _Instruction, results: dict[str, str], times: int, mesh: dict[str, int]) -> Collective:
    kinds = [results[name] for name in _operands(item) if name in results]
    if kind == "ragged-all-to-all":
        kinds = kinds[:1]  # rows; then the buffer that they go to, offsets and sizes
    arrays = [array for result in kinds for array in _ARRAY.findall(result)]
    axes, group = _axes(item.rest, mesh)
    size = sum(BYTES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n) for dtype, shape in arrays)
    label = _NAME.search(item.rest)
    shapes = tuple(f"{dtype}[{shape}]" for dtype, shape in arrays)
    return Collective(kind, axes, size, times, shapes, label.group(1) if label else "", group)


def _axes(text: str, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """Mesh axes along which the devices of a group differ, and how many devices take part in one group."""
    sizes, names = tuple(mesh.values()), tuple(mesh)
    if iota := _IOTA.search(text):
        shape, source, order = iota.groups()
        groups = _iota(source, order).reshape([int(n) for n in shape.split(",")]).tolist()
    elif named := _MESH.search(text):
        groups = _named_groups(*named.groups())
    elif listed := _LISTED.search(text):
        groups = [[int(n) for n in group.split(",") if n.strip()] for group in re.findall(r"\{([^{}]*)\}", listed.group(1))]
    else:  # no groups given: all devices
        groups = [list(range(math.prod(sizes)))]
    places = [np.array(np.unravel_index(group, sizes)) for group in groups if group]
    varying = np.any([(place != place[:, :1]).any(axis=1) for place in places], axis=0)
    return tuple(name for name, varies in zip(names, varying, strict=True) if varies), max(map(len, groups))


def _named_groups(sizes: str, source: str | None, order: str | None, axes: str) -> list[list[int]]:
    """Groups of `mesh['a'=2,'b'=4] {'b':(2)2}`: along axis b, or along the part of size 2 of it that has 2 before it. The devices
    are numbered along the mesh, or (source, order) as for an iota list."""
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    parts = {name: (int(before or 1), int(size or mesh[name])) for name, before, size in _PART.findall(axes)}
    shape, along = [], []
    for name, size in mesh.items():
        before, part = parts.get(name, (1, 1))
        along.append(len(shape) + 1)
        shape += [before, part, size // before // part]
    devices = _iota(source or str(math.prod(shape)), order).reshape(shape)
    devices = np.moveaxis(devices, along, range(-len(along), 0))
    return devices.reshape(-1, math.prod(shape[axis] for axis in along)).tolist()


def _iota(source: str, order: str | None) -> np.ndarray:
    """`[2,4]T(1,0)` -> device numbers in that order, flat."""
    shape = [int(n) for n in source.split(",")]
    devices = np.arange(math.prod(shape)).reshape(shape)
    return (devices if order is None else devices.transpose([int(n) for n in order.split(",")])).reshape(-1)
