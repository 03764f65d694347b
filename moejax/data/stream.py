"""The data of a run as a stream of (batch, state), the same on any number of processes and workers.

B: rows of the global batch, R = B / processes: rows of one process, T: tokens a row (the context).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .mixture import Mixture
from .packing import Packing
from .plan import BatchPlan, RowReader
from .sources import json_digest, tokenizer_fingerprint
from .tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from .prefetch import Prefetcher

Batch = dict[str, np.ndarray]
State = dict[str, Any]


class DataStream:
    """`batch, state = next(stream)`.

    batch: arrays [R,T] of this process's rows.
        tokens int32: ids, the pad id at padding. targets int32: tokens[t + 1] where that is in the same piece, else 0.
        loss_mask bool: targets[t] counts: False at the last token of each piece, where the source's mask says so, at padding.
        segment_ids int32: 1, 2, ... for the pieces of a row, 0 at padding. positions int32: from the start of the piece.
        domains int8: the source's number in the mixture, 0 at padding.
    state: JSON of a few kilobytes, the position AFTER this batch. It speaks of the global sequence of rows only: the rest of the run is
        the same rows in the same order whatever the number of processes, workers and rows a batch after the restart.

    mixture, packing (a `Packing` or its kind), context, seed: what decides the rows, together with the tokenizer and `repeat`.
    rows: B. process: (index, count); process p gets rows p R .. (p + 1) R - 1, as `jax.make_array_from_process_local_data` wants them
        of processes that share the batch. Processes that hold the same rows (a mesh axis of sequence or tensor) give the same index.
    workers: processes that make batches ahead (grain); 0: none. prefetch: batches made ahead, ready in this process.
        A script with workers needs `if __name__ == "__main__":`, as with every use of multiprocessing.
    repeat: False ends with StopIteration once every source has been read once; the last batch is padded with empty rows.
    tokenizer: of the sources; None: bytes. pad_id: where the tokenizer has no pad token.

    ValueError: context < 2, rows that do not divide among the processes, a source of another tokenizer, no pad id.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        context: int,
        rows: int,
        packing: Packing | str = "first_fit",
        seed: int = 0,
        process: tuple[int, int] = (0, 1),
        workers: int = 0,
        prefetch: int = 2,
        repeat: bool = True,
        tokenizer: Any = None,
        pad_id: int | None = None,
    ):
        self.mixture, self.context, self.rows, self.seed, self.repeat = mixture, context, rows, seed, repeat
        self.packing = Packing(packing) if isinstance(packing, str) else packing
        self.process, self.workers, self.prefetch = process, workers, prefetch
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.pad_id = self.tokenizer.pad_id if pad_id is None else pad_id
        self._check()
        self._fingerprint = self._make_fingerprint()
        self._plan = self._new_plan()
        self._reader = RowReader(mixture, context=context, pad_id=self.pad_id)
        self._begin = self._state = self._plan.state()
        self._prefetcher: Prefetcher | None = None
        self._wait = self._wait_total = 0.0
        self._depth = 0

    def __iter__(self) -> DataStream:
        return self

    def __next__(self) -> tuple[Batch, State]:
        start = time.perf_counter()
        self._depth = 0
        if self.workers:
            prefetcher = self._prefetcher or self._start()
            self._depth = prefetcher.depth()
            batch, state = prefetcher.get()
        else:
            batch, state = self._make()
        self._begin, self._state = self._state, state
        self._wait = time.perf_counter() - start
        self._wait_total += self._wait
        return batch, state

    def state(self) -> State:
        """The position after the batch given out last; before the first, where the stream begins."""
        return self._state

    def restore(self, state: State) -> None:
        """Go on after the batch that came with `state`. ValueError for a state of another pipeline: see `check_fingerprint`."""
        plan = self._new_plan()
        plan.restore(state)
        self._go_to(plan)

    def switch(
        self,
        *,
        context: int,
        mixture: Mixture | None = None,
        packing: Packing | str | None = None,
        rows: int | None = None,
        workers: int | None = None,
        prefetch: int | None = None,
    ) -> DataStream:
        """The stream of the next stage; this one is closed.

        Every source goes on at its cursor. Documents begun or packed but not given out are packed first by the new stage, what is left
        of a long one as one document. A source without a weight from here on must stay among the mixture's sources while pieces of it
        are held. None: as it was.
        """
        stream = DataStream(
            self.mixture if mixture is None else mixture,
            context=context,
            rows=self.rows if rows is None else rows,
            packing=self.packing if packing is None else packing,
            seed=self.seed,
            process=self.process,
            workers=self.workers if workers is None else workers,
            prefetch=self.prefetch if prefetch is None else prefetch,
            repeat=self.repeat,
            tokenizer=self.tokenizer,
            pad_id=self.pad_id,
        )
        plan = stream._new_plan()
        plan.adopt(self._state, self.packing, self.context)
        stream._go_to(plan)
        self.close()
        return stream

    def fingerprint(self) -> dict[str, Any]:
        """JSON: all that decides the rows and nothing else; equal fingerprints give equal rows from equal states."""
        return self._fingerprint

    def metrics(self) -> dict[str, Any]:
        """Of the batch given out last, and since the start of the run (`total`). The same on all processes but for wait and queue.

        wait: seconds `next` took; queue_depth: batches that were ready when it was called (0 without workers); padding_share: of the
        global batch; tokens: {source: tokens}; dropped_tokens: drawn but neither given out nor held, 0 unless there is a bug.
        """
        before, after = self._begin, self._state
        cells, cells_total = (after["rows"] - before["rows"]) * self.context, sum(after["tokens"].values()) + after["padding"]
        tokens = {name: count - before["tokens"].get(name, 0) for name, count in after["tokens"].items()}
        return {
            "wait": self._wait,
            "wait_total": self._wait_total,
            "queue_depth": self._depth,
            "padding_share": (after["padding"] - before["padding"]) / cells if cells else 0.0,
            "padding_share_total": after["padding"] / cells_total if cells_total else 0.0,
            "tokens": tokens,
            "tokens_total": dict(after["tokens"]),
            "dropped_tokens": after["drawn_tokens"] - after["held_tokens"] - sum(after["tokens"].values()),
        }

    def close(self) -> None:
        """Stop the workers. The next `next` would start them again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def __enter__(self) -> DataStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        index, count = self.process
        if self.context < 2:
            raise ValueError(f"context={self.context}; a row needs at least 2 tokens to have a target.")
        if not 0 <= index < count:
            raise ValueError(f"process={self.process}; it is (index, count) with 0 <= index < count.")
        if self.rows < 1 or self.rows % count:
            raise ValueError(
                f"rows={self.rows} do not divide among {count} processes, which must hold equal parts of the batch; "
                f"take {max(self.rows // count, 1) * count} or {(self.rows // count + 1) * count} rows."
            )
        if self.workers < 0 or self.prefetch < 1:
            raise ValueError(f"workers={self.workers}, prefetch={self.prefetch}; needed: workers >= 0 and prefetch >= 1.")
        if self.pad_id is None:
            raise ValueError(f"{self.tokenizer!r} has no pad token; give pad_id= an id that no text produces.")
        for source in self.mixture.sources:
            other = getattr(source, "tokenizer", None)
            if other is not None and tokenizer_fingerprint(other) != tokenizer_fingerprint(self.tokenizer):
                raise ValueError(f"source {source.name!r} has another tokenizer than the stream; give the stream tokenizer= the same one.")

    def _make_fingerprint(self) -> dict[str, Any]:
        return {
            **self.mixture.fingerprint(),
            "context": self.context,
            "packing": self.packing.fingerprint(self.context),
            "seed": self.seed,
            "repeat": self.repeat,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "pad_id": self.pad_id,
        }

    def _new_plan(self) -> BatchPlan:
        digest = json_digest(self._fingerprint)
        return BatchPlan(self.mixture, self.packing, context=self.context, seed=self.seed, repeat=self.repeat, fingerprint=digest)

    def _go_to(self, plan: BatchPlan) -> None:
        self.close()
        self._plan = plan
        self._begin = self._state = plan.state()

    def _make(self) -> tuple[Batch, State]:
        return make_next(self._plan, self._reader, rows=self.rows, process=self.process)

    def _start(self) -> Prefetcher:
        try:
            from .prefetch import Prefetcher
        except ImportError as error:
            raise ImportError(f"workers={self.workers} needs grain ({error}): pip install 'moejax[data]', or workers=0.") from error
        share = WorkerShare(self._new_plan(), self._state, self._reader, self.rows, self.process)
        self._prefetcher = Prefetcher(share, workers=self.workers, ahead=self.prefetch)
        return self._prefetcher


class WorkerShare:
    """(worker, workers) -> the batches that this worker makes; travels to the worker process."""

    def __init__(self, plan: BatchPlan, state: State, reader: RowReader, rows: int, process: tuple[int, int]):
        self.plan, self.state, self.reader, self.rows, self.process = plan, state, reader, rows, process

    def __call__(self, worker: int, workers: int) -> Iterator[tuple[Batch, State]]:
        self.plan.restore(self.state)
        try:
            while True:
                for _ in range(worker):
                    self._skip()
                yield make_next(self.plan, self.reader, rows=self.rows, process=self.process)
                for _ in range(workers - worker - 1):
                    self._skip()
        except StopIteration:
            return

    def _skip(self) -> None:
        if not self.plan.rows(self.rows):
            raise StopIteration


def make_next(plan: BatchPlan, reader: RowReader, *, rows: int, process: tuple[int, int]) -> tuple[Batch, State]:
    """Plan the next global batch and make this process's rows of it; StopIteration at the end of the data."""
    planned = plan.rows(rows)
    if not planned:
        raise StopIteration
    index, count = process
    own = rows // count
    return reader.batch(planned[index * own : (index + 1) * own], own), plan.state()


def check_fingerprint(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """ValueError that lists each entry in which the fingerprint saved with a checkpoint differs from this run's, with both values."""
    left, right = dict(_entries(saved)), dict(_entries(here))
    missing = "(none)"
    lines = [
        f"  {name}: saved {left.get(name, missing)!r}, here {right.get(name, missing)!r}"
        for name in sorted({*left, *right})
        if left.get(name, missing) != right.get(name, missing)
    ]
    if lines:
        raise ValueError(
            "the data of the checkpoint is not the data of this run, so its position in it means nothing:\n"
            + "\n".join(lines)
            + "\nUse the saved settings and files, or start the data anew by not restoring the data state."
        )


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts as (dotted name, value)."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _entries(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
