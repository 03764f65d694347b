"""The progress bar of loading."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Sharding

from .names import Parameter

Index = tuple[slice, ...]


class Progress:
    """A bar over the bytes of this process's shards, on stderr."""

    def __init__(self, table: list[Parameter], targets: list[tuple[np.dtype, Sharding | None]], show: bool | None):
        self.show = sys.stderr.isatty() and jax.process_index() == 0 if show is None else show
        self.total = 0
        for parameter, (dtype, sharding) in zip(table, targets, strict=True):
            shards = {(): parameter.shape}
            if sharding is not None:
                indices = sharding.addressable_devices_indices_map(parameter.shape).values()
                shards = {_key(index, parameter.shape): _lengths(index, parameter.shape) for index in indices}
            self.total += sum(math.prod(lengths) for lengths in shards.values()) * dtype.itemsize

    def __enter__(self) -> Callable[[int], None]:
        if not self.show:
            return lambda count: None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        return lambda count: self.bar.advance(task, count)

    def __exit__(self, *error: object) -> None:
        if self.show:
            self.bar.stop()


def _lengths(index: Index | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if index is None else tuple(len(range(*part.indices(length))) for part, length in zip(index, shape, strict=True))


def _key(index: Index | None, shape: tuple[int, ...]) -> tuple:
    return () if index is None else tuple(part.indices(length) for part, length in zip(index, shape, strict=True))
