"""Device memory by topology name: "v5p:4x4x8", "v6e:16x16", "h200:8"."""

from __future__ import annotations

import dataclasses
import math

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator as JAX sees it."""

    usable: float
    """GiB of one device that a program may take."""
    axes: int | None
    """Numbers in a topology of it; None: any."""
    devices: int = 1
    """JAX devices a chip."""


# TPU: the limit that XLA states when it refuses a program that is too large ("Used ... of 95.73G hbm"), libtpu 0.0.52; a
# tpu7x chip is two JAX devices. GPU: nvidia-smi's memory.total (81,559 and 143,771 MiB) less 0.6 GiB that the driver and the
# CUDA context keep.
CHIPS = {
    "v5p": Chip(95.73, 3),
    "v5e": Chip(15.75, 2),
    "v6e": Chip(31.24, 2),
    "tpu7x": Chip(94.74, 3, devices=2),
    "h100": Chip(79.0, None),
    "h200": Chip(139.8, None),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips of one kind. `name` is what libtpu understands."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> Topology:
        """From "v5p:4x4x8". ValueError: an unknown kind, or a shape that it cannot have."""
        kind, _, shape = name.partition(":")
        if kind not in CHIPS:
            raise ValueError(f"topology {name!r}: unknown chip {kind!r}; known: {', '.join(CHIPS)}.")
        parts = shape.split("x")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"topology {name!r}: after the colon come numbers of chips, as in 'v5p:4x4x8' or 'h200:8'.")
        axes = CHIPS[kind].axes
        if axes is not None and len(parts) != axes:
            example = "x".join(["4"] * axes)
            raise ValueError(f"topology {name!r}: {kind} has {axes} dimensions, as in '{kind}:{example}'.")
        return cls(kind, tuple(map(int, parts)))

    @property
    def name(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """JAX devices in all."""
        return math.prod(self.shape) * CHIPS[self.kind].devices

    @property
    def memory(self) -> int:
        """Usable bytes of one device."""
        return int(CHIPS[self.kind].usable * GIB)

    @property
    def is_tpu(self) -> bool:
        return CHIPS[self.kind].axes is not None
