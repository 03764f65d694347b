import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.report import TAIL, balance_figures, summary_lines
from moejax.train.sample import sample_window
from moejax.train.throughput import PEAK_BF16, peak_flops


def _successor(seen):
    """A model that puts its logits on the next integer of the last real token (vocabulary 50); `seen` gets each window."""

    def apply(variables, tokens, segment_ids):
        jax.debug.callback(lambda t, s: seen.append((t[0].tolist(), s[0].tolist())), tokens, segment_ids)
        return 10.0 * jax.nn.one_hot(tokens + 1, 50) + 5.0 * jax.nn.one_hot(jnp.full_like(tokens, 2), 50)

    return apply


def _sample(prompt, *, count=6, window=4, allowed=None, stop_id=49, temperature=0.0, seen=None):
    allowed = np.ones(50, bool) if allowed is None else allowed
    apply = _successor([] if seen is None else seen)
    key = jax.random.key(0)
    arguments = {"count": count, "window": window, "allowed": allowed, "stop_id": stop_id, "key": key}
    return sample_window(apply, {}, np.array(prompt), temperature=temperature, **arguments).tolist()


def test_sampling_continues_slides_its_window_and_stops():
    seen = []
    assert _sample([7, 8], seen=seen) == [9, 10, 11, 12, 13, 14]
    jax.effects_barrier()
    assert seen[0] == ([7, 8, 0, 0], [1, 1, 0, 0])
    assert seen[-1] == ([10, 11, 12, 13], [1, 1, 1, 1])
    assert _sample([46]) == [47, 48]  # 49 ends it and is not part of the text
    allowed = np.ones(50, bool)
    allowed[9] = False
    assert _sample([8], allowed=allowed, count=2) == [2, 3]  # the next best
    assert _sample([7], temperature=50.0) != [8, 9, 10, 11, 12, 13]  # nearly uniform over 50


def test_sampling_refuses_what_it_cannot_do():
    for prompt, changes in (([], {}), ([1], {"window": 1}), ([1], {"temperature": -1.0})):
        with pytest.raises(ValueError, match="a window of 2"):
            _sample(prompt, **changes)


def test_peak_is_the_vendors_or_measured():
    def device(kind):
        return types.SimpleNamespace(device_kind=kind)

    assert peak_flops(device("NVIDIA H200")).flops == PEAK_BF16["NVIDIA H200"]
    assert peak_flops(device("TPU v5 lite")).flops == 197e12  # the longest name wins over "TPU v5"
    assert peak_flops(device("NVIDIA H100 80GB HBM3")).source.endswith("vendor's figure")
    peak = peak_flops(size=256)
    assert 1e8 < peak.flops < 1e14 and "measured" in peak.source


def _record(step, violation):
    layers = {"max_violation": [violation, 3 * violation], "load_cv": [0.5, 0.7], "load_cv_floor": [0.1, 0.1]}
    return {"step": step, **layers, "dead_experts": [1, 2]}


def test_balance_figures_are_step_one_and_the_mean_of_the_last():
    figures = balance_figures([_record(1, 2.0), *(_record(s, 0.5) for s in range(2, 30)), _record(30, 1.5)])
    assert figures["first"]["max_violation"] == 4.0 and figures["first"]["max_violation_worst_layer"] == 6.0
    assert figures["last"]["max_violation"] == pytest.approx(2 * (0.5 * (TAIL - 1) + 1.5) / TAIL)
    assert figures["last"]["dead_experts"] == 3.0 and figures["last"]["load_cv"] == pytest.approx(0.6)
    assert balance_figures([{"step": 1, "loss": 1.0}]) == {} == balance_figures([])


def test_the_summary_says_plainly_whether_the_bigram_is_beaten():
    speed = {"tokens_per_second": 1000.0, "mfu": 0.1, "peak_flops": 5e10, "peak_source": "x", "seconds": 9.0}
    summary = {
        **{"preset": "tiny", "step": 5, "steps": 9, "ended_by": "Ctrl-C", "balance": {}, "sample": "a\x1b[2Jb"},
        "speed": speed | {"compile_seconds": 4.0, "compiles": 2},
        "heldout": {"before": 8.0, "after": 3.0, "unigram": 5.0, "bigram": 4.0},
    }
    text = "\n".join(summary_lines(summary))
    assert "25.0% below the bigram counts" in text and "5 of 9 steps, ended early by Ctrl-C" in text
    assert "9 s in all, of which the train step's compile 4 s, 2 compiles" in text
    assert "\x1b" not in text  # a sampled escape sequence must not reach the terminal
    summary["heldout"]["after"] = 5.0
    summary["speed"]["compiles"] = 0
    text = "\n".join(summary_lines(summary))
    assert "25.0% ABOVE the bigram counts" in text and "9 s in all" in text and "compile" not in text
