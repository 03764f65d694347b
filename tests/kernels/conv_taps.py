"""What each token of a packed row convolves, by a plain loop: the oracle of the short convolution's tests."""

import numpy as np


def selections(segment_ids, width):
    """Which rows of concat(history, x) each tap of each token reads, and the carried rows, as 0/1 matrices."""
    batch, tokens = segment_ids.shape
    taps = np.zeros((width, batch, tokens, width - 1 + tokens))
    kept = np.zeros((batch, width - 1, width - 1 + tokens))
    for b in range(batch):
        own, current = list(range(width - 1)), None
        for t in np.flatnonzero(segment_ids[b]):
            if current not in (None, segment_ids[b, t]):
                own = []
            current = segment_ids[b, t]
            own.append(width - 1 + t)
            for back, row in enumerate(reversed(own[-width:])):
                taps[width - 1 - back, b, t, row] = 1
        for place, row in enumerate(reversed(own[len(own) - min(len(own), width - 1) :])):
            kept[b, width - 2 - place, row] = 1
    return taps, kept
