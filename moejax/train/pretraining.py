"""Pre-training from text to summary: corpus, model, loop, checkpoints, scores. The script is experiments/pretrain.py.

B: rows a batch, M: micro-batches, T: tokens a row (the context).
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..config import ModelConfig
from ..data import (
    ByteTokenizer,
    Corpus,
    CorpusSource,
    CountModels,
    DataStream,
    Document,
    Mixture,
    PackedBatches,
    TokenStream,
    valid_targets,
)
from ..data.stream import check_fingerprint
from ..modules.model import HybridLM
from ..parallel import ModelParallel, batch_sharding, make_mesh, parameter_shardings
from ..parallel.agreement import text_of_any
from .caretaker import Caretaker
from .display import Display
from .events import Event, EventLog
from .flops import flops_per_token
from .html_report import write_report
from .loop import LoopResult, StepTimes, StopRequest, run_loop, stop_on_signals
from .observation import Observation
from .optimizers import make_optimizer, make_schedule
from .replay import ReplayProbe
from .report import balance_figures, draw, summary_lines
from .run_config import PROFILED_STEPS, PretrainConfig, write_json
from .sample import sample_window
from .state import init_state
from .step import make_eval_step, make_train_step
from .throughput import peak_flops
from .tracker import CompileCounter, Tracker

AGREE_EVERY = 10  # steps between the processes' agreements on whether to end: each waits for the device
SHOWN_EVENTS = ("alarm", "rollback", "stall", "replay_mismatch", "checkpoint_failed", "stopped")
LONG_FILE = 32 << 10  # bytes: files above are a domain of their own, whose loss is shown apart


class Pretraining:
    """One run: its corpus, model, data, records and checkpoints. `run` trains, `score` scores."""

    def __init__(self, config: PretrainConfig, model: ModelConfig, corpus: Corpus, folder: pathlib.Path, display: Display):
        self.start = time.monotonic()
        self.config, self.model_config, self.corpus, self.folder, self.display = config, model, corpus, folder, display
        self.tokenizer = ByteTokenizer()
        if model.vocab_size < self.tokenizer.vocab_size:
            raise ValueError(f"the model's vocab_size is {model.vocab_size}; the tokenizer's ids go up to {self.tokenizer.vocab_size - 1}.")
        self.mesh = make_mesh(config.mesh) if config.mesh.size > 1 else None
        parallel = None if self.mesh is None else ModelParallel(self.mesh)
        self.model = HybridLM(model, parallel=parallel)
        self.optimizer = make_optimizer(config.optimizer_config, parallel)
        with display.phase("counting the text"):
            self.counts = CountModels(TokenStream(corpus.train, self.tokenizer))
        manifest = corpus.manifest
        display.note(
            f"text: {manifest.source}; {manifest.train_documents} documents ({manifest.train_bytes / 1e6:.1f} MB) "
            f"to train on, {manifest.heldout_documents} ({manifest.heldout_bytes / 1e6:.2f} MB) held out"
        )
        self.stream = self._make_stream()
        self.first_process = jax.process_index() == 0
        self._spare = None if self.first_process else tempfile.TemporaryDirectory()  # where the others write what nobody reads
        self.scratch = folder if self._spare is None else pathlib.Path(self._spare.name)
        self.tracker = Tracker(self.scratch, total_steps=config.total_steps)
        self.compiles = CompileCounter("train_step")
        domains = len(self.stream.mixture.names)
        step = make_train_step(self.model, self.optimizer, domains=domains, qk_clip=config.qk_clip)

        def train_step(state, batch):  # the name that the compile counter looks for
            return step(state, batch)

        self._shardings = None if self.mesh is None else parameter_shardings(self._state_shapes(), self.mesh)
        shardings = None if self.mesh is None else (self._shardings, NamedSharding(self.mesh, PartitionSpec()))
        self._train_step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
        self._eval_step = jax.jit(make_eval_step(self.model))
        self._events: EventLog | None = None
        self._step = 0  # the one being done
        self.observation: Observation | None = None
        self.caretaker = Caretaker(
            config.safety,
            folder / "checkpoint",
            scratch=self.scratch,
            save_every=config.checkpoint_every,
            metadata=self._metadata,
            template=self.state_template,
            write=self._log,
            rewound=self._rewound,
            events=self.record,
        )

    def _make_stream(self) -> DataStream:
        """Files of up to 32 KB and longer ones as two domains, drawn as often as they are: all text comes once an epoch."""
        c = self.config
        sources = [CorpusSource(name, documents, self.tokenizer) for name, documents in by_domain(self.corpus).items()]
        rows, process = c.batch * c.micro_batches, (0, 1)
        if self.mesh is not None and c.micro_batches == 1:
            process = own_rows(batch_sharding(self.mesh), (rows, c.context))
        return DataStream(
            Mixture(sources),
            context=c.context,
            rows=rows,
            packing=c.packing,
            seed=c.seed,
            process=process,
            workers=c.data_workers,
        )

    def _rewound(self, step: int) -> None:
        self.tracker.rewind(step)
        if self.observation is not None:
            self.observation.rewind(step)

    def record(self, event: Event) -> None:
        """Write an event down and show what a person should know; only the first process does."""
        if self._events is not None:
            self._events.record(event)
        if event["event"] in SHOWN_EVENTS:
            facts = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "step", "report"))
            self.display.note(f"{event['event']} at step {event['step']}: {facts}")
        if self.observation is not None:
            self.observation.event(event)

    def initial_state(self) -> Any:
        # It runs once; on a CPU 10 of the 16 s of compiling are LLVM's optimiser, which saves 0.04 s of the run.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        initialise = jax.jit(
            lambda key: init_state(self.model, self.optimizer, key, balance=self.config.strength.create()),
            compiler_options=options,
            out_shardings=self._shardings,
        )
        return initialise(jax.random.key(self.config.seed))

    def state_template(self) -> Any:
        """Shapes and dtypes of the state, with its shardings on a mesh."""
        shapes = self._state_shapes()
        if self._shardings is None:
            return shapes
        return jax.tree.map(lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own), shapes, self._shardings)

    def _state_shapes(self) -> Any:
        return jax.eval_shape(lambda key: init_state(self.model, self.optimizer, key), jax.random.key(self.config.seed))

    def _place(self, batch: dict[str, np.ndarray], process: tuple[int, int] = (0, 1)) -> dict[str, Any]:
        """On a mesh every device gets its rows and its part of the time axis. process: whose rows `batch` holds, as in `DataStream`."""
        if self.mesh is None:
            return batch
        sharding = batch_sharding(self.mesh, micro_batches=batch["tokens"].ndim == 3)
        index, count = process

        def global_array(x: np.ndarray) -> jax.Array:
            shape = (len(x) * count, *x.shape[1:])

            def part(where):
                begin, end, _ = where[0].indices(shape[0])
                return x[(slice(begin - index * len(x), end - index * len(x)), *where[1:])]

            return jax.make_array_from_callback(shape, sharding, part)

        return {name: global_array(x) for name, x in batch.items()}

    def _ready(self, made: tuple[dict[str, np.ndarray], dict]) -> tuple[dict[str, Any], dict]:
        """What the stream gave -> (the batch [B,T], or [M,B,T] with micro-batches, placed on the mesh; the position after it)."""
        (batch, position), c = made, self.config
        if c.micro_batches > 1:
            return self._place({name: x.reshape(c.micro_batches, c.batch, c.context) for name, x in batch.items()}), position
        return self._place(batch, self.stream.process), position

    def heldout_batches(self) -> list[dict[str, np.ndarray]]:
        """Held-out rows in batches [B,T], the same for every seed; rows past the end of the text are padding."""
        c = self.config
        stream = TokenStream(self.corpus.heldout, self.tokenizer)
        rows = PackedBatches(stream, context=c.context, batch_size=c.batch, seed=0)
        wanted = min(c.heldout_rows, rows.rows_per_epoch)
        batches = [rows.batch(i) for i in range(-(-wanted // c.batch))]
        extra = len(batches) * c.batch - wanted
        if extra:
            batches[-1]["segment_ids"][-extra:] = 0
        return batches

    def score(self, state: Any) -> dict[str, float]:
        """Bits per byte on the held-out rows: {"model", "unigram", "bigram"}, all three on the very same targets."""
        sums = {"model": 0.0, "unigram": 0.0, "bigram": 0.0, "bytes": 0.0}
        for batch in self.heldout_batches():
            for name, value in self.counts.score(batch).items():
                sums[name] += value
            result = jax.device_get(self._eval_step(state, self._place(batch)))
            if int(result["tokens"]) != int(valid_targets(batch["tokens"], batch["segment_ids"]).sum()):
                raise RuntimeError(f"the model scored {result['tokens']} targets, the count models another number.")
            sums["model"] += float(result["loss_sum"]) / np.log(2)
        if not sums["bytes"]:
            raise ValueError("the held-out text has no target; give more text, or --context a larger value.")
        return {name: sums[name] / sums["bytes"] for name in ("model", "unigram", "bigram")}

    def restore(self) -> tuple[Any, dict[str, Any]]:
        """The latest checkpoint of the folder and its metadata. ValueError when it was trained on other text or other data settings."""
        state, metadata = self.caretaker.checkpoints.restore(self.state_template(), on_damage=self.config.on_damage)
        saved, here = metadata["corpus"], self.corpus.manifest
        if saved["sha256"] != here.sha256:
            raise ValueError(
                f"the run's text has sha256 {saved['sha256'][:16]} ({saved['source']}, Python {saved['python']}), "
                f"the text here {here.sha256[:16]} ({here.source}, Python {here.python}). "
                "Give the same text: run the same Python, or name the folder with --corpus."
            )
        check_fingerprint(metadata["data"]["fingerprint"], self.stream.fingerprint())
        return state, metadata

    def _metadata(self, step: int, position: Any) -> dict[str, Any]:
        return {
            "step": step,
            "config": self.config.to_dict(),
            "model": self.model_config.to_dict(),
            "corpus": self.corpus.manifest.to_dict(),
            "data": {"fingerprint": self.stream.fingerprint(), "position": position},
        }

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Train to the end or until told to stop; -> the summary, which also lies in the run folder."""
        display, care = self.display, self.caretaker
        with contextlib.ExitStack() as stack:
            request = stack.enter_context(stop_on_signals(display.note))
            stack.callback(self.stream.close)
            if self.first_process:
                self._events = stack.enter_context(EventLog(self.folder / "events.jsonl"))
            if resume:
                with display.phase("restoring the checkpoint"), care.goodput.phase("restore"):
                    state, metadata = self.restore()
                first = int(metadata["step"])
                course = care.course(first)
                self.stream.restore(metadata["data"]["position"] if course is None else course["position"])
                care.resume(metadata)
                self.tracker.rewind(first)
                display.note(f"going on after step {first} of {self.config.total_steps}")
            else:
                with display.phase("initialising the model"), care.goodput.phase("compile"):
                    state, first = jax.block_until_ready(self.initial_state()), 0
            self.observation = Observation(
                self.config.observe,
                self.model,
                self.stream.mixture.names,
                self.scratch,
                first=first,
                port=self.config.metrics_port,
                note=display.note,
            )
            stack.callback(self.observation.close)
            if first == 0:
                text = "scoring the held-out text before training (compiles the model's forward)"
                with display.phase(text), care.goodput.phase("evaluation"):
                    score = self.score(state)
                self.tracker.heldout.append({"step": 0, "bits_per_byte": score["model"]})
            stack.enter_context(care.watchdog)
            try:
                result = self._train(state, first, request)
                if not care.report:
                    care.save(result.step, result.state, result.data)
            except BaseException:
                care.abandon()
                raise
            care.close()
            with care.watchdog.busy("scoring and drawing", 7200.0):
                return self._finish(result)

    def _train(self, state: Any, first: int, request: StopRequest) -> LoopResult:
        c, display, care = self.config, self.display, self.caretaker
        self._peak, self._flops = peak_flops(), flops_per_token(self.model_config, c.context)
        self._rates = np.asarray(make_schedule(c.optimizer_config)(np.arange(c.total_steps)))
        self._times: list[float] = []
        every = c.safety.replay_every
        run_step = self._train_step
        if every is not None:
            probe = ReplayProbe(self._train_step, every=every, record=self.record)
            run_step = lambda state, batch: probe(self._step, state, batch)
        compiled = False  # not the counter's word: it listens to an event of JAX that may be renamed

        def train_step(state, batch):
            nonlocal compiled
            if not compiled:
                compiled = True
                with (
                    display.phase("compiling the train step (once; up to two minutes on a small machine)"),
                    care.goodput.phase("compile"),
                    care.watchdog.busy("compiling", 7200.0),
                ):
                    out = jax.block_until_ready(run_step(state, batch))
            else:
                out = run_step(state, batch)
            if self.observation is not None:
                self.observation.look(self._step, out[0], batch)
            return out

        care.goodput.begin()
        last = c.total_steps if c.stop_after is None else min(c.total_steps, c.stop_after)
        with display.training(first=first, total=c.total_steps):
            result = run_loop(
                train_step,
                state,
                map(self._ready, self.stream),
                care,
                first=first,
                last=last,
                data=self.stream.state(),
                request=request,
                deadline=None if c.time_limit is None else self.start + 60 * c.time_limit,
                before_step=self._before_step(first),
                agree=text_of_any,
                agree_every=1 if jax.process_count() == 1 else AGREE_EVERY,
            )
        care.goodput.finish()
        if c.profile:
            self._stop_profile()
        if self.compiles.count > 1:
            display.note(f"warning: the train step was compiled {self.compiles.count} times; 1 is expected.")
        speed = c.tokens_per_step / float(np.median(self._times[1:])) if self._times[1:] else 0.0
        self.speed = {
            "tokens_per_second": speed,
            "mfu": speed * self._flops / self._peak.flops,
            "peak_flops": self._peak.flops,
            "peak_source": self._peak.source,
            "compile_seconds": self.compiles.seconds,
            "compiles": self.compiles.count,
            "cache_hits": self.compiles.cache_hits,
        }
        if not result.reason and result.step < c.total_steps:
            result = dataclasses.replace(result, reason=f"--stop-after {c.stop_after}")
        return result

    def _log(self, step: int, metrics: dict[str, np.ndarray], times: StepTimes) -> None:
        """A step's metrics: into the records, to the sinks and onto the display."""
        metrics["learning_rate"] = self._rates[metrics.pop("updates")]
        speed = self.config.tokens_per_step / times.seconds
        self._times.append(times.seconds)
        wall = {"seconds": times.seconds, "data_wait": times.data_wait, "tokens_per_second": speed}
        wall["checkpoint"], self.caretaker.save_seconds = self.caretaker.save_seconds, 0.0
        wall |= {"mfu": speed * self._flops / self._peak.flops, "compiles": self.compiles.count}
        record = self.tracker.log(step, metrics, wall)
        if self.observation is not None:
            self.observation.write(step, record, metrics)
        balance = f"  MaxVio {metrics['max_violation'].mean():.2f}" if "max_violation" in metrics else ""
        self.display.step(step, f"loss {metrics['loss'] / np.log(2):.3f} bits  {speed:,.0f} tokens/s{balance}")

    def _before_step(self, first: int) -> Callable[[int], None]:
        """Called before each step: notes its number, starts and stops the trace."""
        begin = first + PROFILED_STEPS[0]
        end = first + PROFILED_STEPS[1] + 1
        self._tracing = False

        def before_step(step: int) -> None:
            self._step = step
            if self.config.profile and step == begin and not self._tracing:
                jax.profiler.start_trace(str(self.folder / "profile"))
                self._tracing = True
            elif step == end:
                self._stop_profile()

        return before_step

    def _stop_profile(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def _finish(self, result: LoopResult) -> dict[str, Any]:
        display, c = self.display, self.config
        with display.phase("scoring the held-out text"), self.caretaker.goodput.phase("evaluation"):
            score = self.score(result.state)
        self.tracker.heldout.rewind(result.step - 1)  # a finished run that is resumed is scored once more
        self.tracker.heldout.append({"step": result.step, "bits_per_byte": score["model"]})
        sample = ""
        if c.sample_bytes:
            with display.phase("sampling"):
                sample = c.prompt + self.sample(result.state)
        before = [r["bits_per_byte"] for r in self.tracker.heldout.read() if r["step"] == 0]
        baselines = {name: score[name] for name in ("unigram", "bigram")}
        summary = {
            "preset": c.preset,
            "step": result.step,
            "steps": c.total_steps,
            "ended_by": result.reason,
            "heldout": {"before": before[0] if before else None, "after": score["model"], **baselines},
            "balance": balance_figures(self.tracker.metrics.read()),
            "skipped_updates": int(jax.device_get(result.state.skipped)),
            "failure": self.caretaker.report,
            "goodput": self.caretaker.goodput.figures(),
            "speed": self.speed | {"seconds": time.monotonic() - self.start},
            "sample": sample,
            "corpus": self.corpus.manifest.to_dict(),
        }
        if not self.first_process:
            return summary
        try:
            with display.phase("drawing"):
                summary["pictures"] = draw(self.folder, self.tracker, baselines)
        except ImportError:
            summary["pictures"] = []
            display.note("no pictures: they need matplotlib (pip install 'moejax[plot]')")
        write_json(self.folder / "summary.json", summary)
        if summary["pictures"]:
            with display.phase("writing the report"):
                write_report(self.folder)
            summary["pictures"].append("report.html")
        (self.folder / "summary.txt").write_text("\n".join(summary_lines(summary)) + "\n")
        return summary

    def sample(self, state: Any) -> str:
        """A continuation of the prompt, by the settings' temperature and seed."""
        c, tokenizer = self.config, self.tokenizer
        allowed = np.zeros(self.model_config.vocab_size, bool)
        allowed[: tokenizer.num_bytes] = allowed[tokenizer.eos_id] = True
        ids = sample_window(
            lambda variables, tokens, segments: self.model.apply(variables, tokens, segments),
            {"params": state.params, "router_state": state.router_state},
            tokenizer.encode(c.prompt, bos=True),
            count=c.sample_bytes,
            window=min(c.context, 128),
            allowed=allowed,
            stop_id=tokenizer.eos_id,
            temperature=c.temperature,
            key=jax.random.fold_in(state.rng, int(state.step)),
        )
        return tokenizer.decode(ids, errors="replace")


def by_domain(corpus: Corpus) -> dict[str, list[Document]]:
    """The training documents by domain, whose losses are shown apart: "files", and "long_files" of more than 32 KB."""
    parts: dict[str, list[Document]] = {"files": [], "long_files": []}
    for document in corpus.train:
        parts["long_files" if len(document.data) > LONG_FILE else "files"].append(document)
    return {name: documents for name, documents in parts.items() if documents}


def own_rows(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, int]:
    """(index, count) of this process among those that share the rows of a batch [B,T]; (0, 1) where its rows are no equal part."""
    rows = shape[0]
    parts = [index[0] for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    begin, end = min(part.start or 0 for part in parts), max(rows if part.stop is None else part.stop for part in parts)
    size = end - begin
    return (begin // size, rows // size) if rows % size == 0 and begin % size == 0 else (0, 1)
