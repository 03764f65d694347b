"""Pre-training from text to summary: corpus, model, loop, checkpoints, scores. The script is experiments/pretrain.py.

B: rows a batch, M: micro-batches, T: tokens a row (the context).
"""

from __future__ import annotations

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
    CountModels,
    PackedBatches,
    TokenStream,
    valid_targets,
)
from ..modules.model import HybridLM, check_tokens
from ..parallel import ModelParallel, batch_sharding, make_mesh, parameter_shardings
from ..parallel.agreement import text_of_any
from .checkpoint import Checkpointer
from .display import Display
from .flops import flops_per_token
from .loop import LoopResult, StopRequest, run_loop, stop_on_signals
from .optimizers import adamw, cosine_schedule
from .report import balance_figures, draw, summary_lines
from .run_config import PROFILED_STEPS, PretrainConfig, write_json
from .sample import sample_window
from .state import init_state
from .step import make_eval_step, make_train_step
from .throughput import peak_flops
from .tracker import CompileCounter, Tracker

AGREE_EVERY = 10  # steps between the processes' agreements on whether to end: each waits for the device


class Pretraining:
    """One run: its corpus, model, records and checkpoints. `run` trains, `score` scores."""

    def __init__(self, config: PretrainConfig, model: ModelConfig, corpus: Corpus, folder: pathlib.Path, display: Display):
        self.start = time.monotonic()
        self.config, self.model_config, self.corpus, self.folder, self.display = config, model, corpus, folder, display
        self.tokenizer = ByteTokenizer()
        self.mesh = make_mesh(config.mesh) if config.mesh.size > 1 else None
        self.model = HybridLM(model, parallel=None if self.mesh is None else ModelParallel(self.mesh))
        self.optimizer = adamw(config.optimizer)
        with display.phase("counting the text"):
            train = TokenStream(corpus.train, self.tokenizer)
            self.counts = CountModels(train)
        manifest = corpus.manifest
        display.note(
            f"text: {manifest.source}; {manifest.train_documents} documents ({manifest.train_bytes / 1e6:.1f} MB) "
            f"to train on, {manifest.heldout_documents} ({manifest.heldout_bytes / 1e6:.2f} MB) held out"
        )
        rows = config.batch * config.micro_batches
        self.batches = PackedBatches(train, context=config.context, batch_size=rows, seed=config.seed)
        first: Any = self.batches.batch(0)  # NumPy arrays: the check reads their values
        check_tokens(first["tokens"], first["segment_ids"], model.vocab_size)
        self.first_process = jax.process_index() == 0
        self._spare = None if self.first_process else tempfile.TemporaryDirectory()  # where the others write what nobody reads
        self.tracker = Tracker(folder if self._spare is None else self._spare.name, total_steps=config.total_steps)
        self.checkpoints = Checkpointer(folder / "checkpoint")
        self.compiles = CompileCounter("train_step")
        step = make_train_step(self.model, self.optimizer)

        def train_step(state, batch):  # the name that the compile counter looks for
            return step(state, batch)

        self._shardings = None if self.mesh is None else parameter_shardings(self._state_shapes(), self.mesh)
        shardings = None if self.mesh is None else (self._shardings, NamedSharding(self.mesh, PartitionSpec()))
        self._train_step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
        self._eval_step = jax.jit(make_eval_step(self.model))

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

    def _place(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """On a mesh every device gets its rows and its part of the time axis."""
        if self.mesh is None:
            return batch
        sharding = batch_sharding(self.mesh, micro_batches=batch["tokens"].ndim == 3)
        place = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        return {name: place(x) for name, x in batch.items()}

    def batch(self, index: int) -> dict[str, Any]:
        """The batch after `index` steps: int32 [B,T], or [M,B,T] with micro-batches, placed on the mesh."""
        batch, c = self.batches.batch(index), self.config
        if c.micro_batches > 1:
            batch = {name: x.reshape(c.micro_batches, c.batch, c.context) for name, x in batch.items()}
        return self._place(batch)

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

    def restore(self) -> tuple[Any, int]:
        """The latest checkpoint of the folder. ValueError when it was trained on other text."""
        state, metadata = self.checkpoints.restore(self.state_template())
        saved, here = metadata["corpus"], self.corpus.manifest
        if saved["sha256"] != here.sha256:
            raise ValueError(
                f"the run's text has sha256 {saved['sha256'][:16]} ({saved['source']}, Python {saved['python']}), "
                f"the text here {here.sha256[:16]} ({here.source}, Python {here.python}). "
                "Give the same text: run the same Python, or name the folder with --corpus."
            )
        return state, int(metadata["step"])

    def save(self, step: int, state: Any) -> None:
        metadata = {"step": step, "config": self.config.to_dict(), "corpus": self.corpus.manifest.to_dict()}
        self.checkpoints.save(step, state, metadata)

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Train to the end or until told to stop; -> the summary, which also lies in the run folder."""
        display = self.display
        with stop_on_signals(display.note) as request:
            if resume:
                with display.phase("restoring the checkpoint"):
                    state, first = self.restore()
                self.tracker.rewind(first)
                display.note(f"going on after step {first} of {self.config.total_steps}")
            else:
                with display.phase("initialising the model"):
                    state, first = jax.block_until_ready(self.initial_state()), 0
            if first == 0:
                with display.phase("scoring the held-out text before training (compiles the model's forward)"):
                    score = self.score(state)
                self.tracker.heldout.append({"step": 0, "bits_per_byte": score["model"]})
            result = self._train(state, first, request)
        return self._finish(result)

    def _train(self, state: Any, first: int, request: StopRequest) -> LoopResult:
        c, display = self.config, self.display
        peak = peak_flops()
        flops, tokens = flops_per_token(self.model_config, c.context), c.tokens_per_step
        rates = np.asarray(cosine_schedule(c.optimizer)(np.arange(c.total_steps)))
        updates = first - int(state.skipped)  # a skipped update does not move the schedule
        times: list[float] = []
        compiled = False  # not the counter's word: it listens to an event of JAX that may be renamed

        def train_step(state, batch):
            nonlocal compiled
            if compiled:
                return self._train_step(state, batch)
            compiled = True
            with display.phase("compiling the train step (once; up to two minutes on a small machine)"):
                return jax.block_until_ready(self._train_step(state, batch))

        def on_metrics(step: int, metrics: dict[str, np.ndarray], seconds: float) -> None:
            nonlocal updates
            speed = tokens / seconds
            if step > first + 1:
                times.append(seconds)
            wall = {"seconds": seconds, "tokens_per_second": speed, "mfu": speed * flops / peak.flops}
            wall["compiles"] = self.compiles.count
            metrics["learning_rate"] = rates[updates]
            updates += 1 - int(metrics["skipped"])
            self.tracker.log(step, metrics, wall)
            balance = f"  MaxVio {metrics['max_violation'].mean():.2f}" if "max_violation" in metrics else ""
            display.step(step, f"loss {metrics['loss'] / np.log(2):.3f} bits  {speed:,.0f} tokens/s{balance}")

        last = c.total_steps if c.stop_after is None else min(c.total_steps, c.stop_after)
        with display.training(first=first, total=c.total_steps):
            result = run_loop(
                train_step,
                state,
                self.batch,
                first=first,
                last=last,
                on_metrics=on_metrics,
                save=self.save,
                save_every=c.checkpoint_every,
                request=request,
                deadline=None if c.time_limit is None else self.start + 60 * c.time_limit,
                before_step=self._profiler(first),
                agree=text_of_any,
                agree_every=1 if jax.process_count() == 1 else AGREE_EVERY,
            )
        if c.profile:
            self._stop_profile()
        if self.compiles.count > 1:
            display.note(f"warning: the train step was compiled {self.compiles.count} times; 1 is expected.")
        speed = tokens / float(np.median(times)) if times else 0.0
        self.speed = {
            "tokens_per_second": speed,
            "mfu": speed * flops / peak.flops,
            "peak_flops": peak.flops,
            "peak_source": peak.source,
            "compile_seconds": self.compiles.seconds,
            "compiles": self.compiles.count,
            "cache_hits": self.compiles.cache_hits,
        }
        if not result.reason and result.step < c.total_steps:
            result = dataclasses.replace(result, reason=f"--stop-after {c.stop_after}")
        return result

    def _profiler(self, first: int) -> Callable[[int], None]:
        """Called before each step: starts and stops the trace."""
        begin = first + PROFILED_STEPS[0]
        end = first + PROFILED_STEPS[1] + 1
        self._tracing = False

        def before_step(step: int) -> None:
            if self.config.profile and step == begin:
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
        with display.phase("scoring the held-out text"):
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
            key=jax.random.key(c.seed),
        )
        return tokenizer.decode(ids, errors="replace")
