"""Random numbers as a pure function of (seed, stream, position), the same bits on every platform and NumPy version.

`numpy.random.Generator` may change what `permutation` or `integers` return from one version to the next; a resumed run
must not. SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) is four lines and passes BigCrush.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class CounterHash:
    """Stream number `stream` of seed `seed`; any position is reached at once."""

    def __init__(self, seed: int, *, stream: int = 0):
        words = np.array([seed % 2**64, stream % 2**64], np.uint64)
        self._key = _mix(_mix(words[:1] + _GOLDEN) + words[1:] * _GOLDEN + _GOLDEN)

    def bits(self, start: int, count: int) -> np.ndarray:
        """uint64 [count]: the numbers at positions start, start + 1, ..."""
        positions = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
        return _mix(self._key + positions * _GOLDEN)

    def uniform(self, start: int, count: int) -> np.ndarray:
        """float64 [count] in [0, 1), 53 bits each."""
        return (self.bits(start, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, start: int, count: int, bound: int) -> np.ndarray:
        """int64 [count] in [0, bound). The bias of the remainder is below bound / 2**64."""
        return (self.bits(start, count) % np.uint64(bound)).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """int64 [count]: 0 .. count - 1 in an order of this stream's own."""
        return np.argsort(self.bits(0, count), kind="stable")
