"""The KDA benchmark's rehearsal on a CPU: the whole program on tiny shapes, its peers' process played by a stub."""

import json
import pathlib
import subprocess
import types

import numpy as np
import pytest

BENCH = pathlib.Path(__file__).parents[2] / "experiments" / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import importlib

    return importlib.import_module("kda")


def play_peers(bench, monkeypatch):
    """Instead of kda_peers.py: a measured row for each shape, and the reference itself, rounded to bfloat16, as every output."""

    def run(command, **options):
        if "nvidia-smi" in command[0]:
            raise OSError("no such program")
        spec = json.loads(pathlib.Path(command[2]).read_text())
        with np.load(spec["accuracy"]) as saved:
            stored = dict(saved)
        rows = [
            {"peer": "cuDNN" if kind == "forward" else "cuDNN bare", "kind": kind, "heads": h, "tokens": t, "regime": regime, "ms": 0.5}
            for kind, h, t in spec["shapes"]
            for regime in spec["regimes"]
        ]
        outputs = {}
        for regime in spec["regimes"]:
            fused, bare = bench.exact(stored, regime, True), bench.exact(stored, regime, False)
            outputs |= {f"{regime}|cuDNN:{name}": fused[name][0].astype(np.float32) for name in ("o", "state")}
            outputs |= {f"{regime}|cuDNN bare:{name}": bare[name][0].astype(np.float32) for name in ("dq", "dg", "dbeta")}
        np.savez(spec["accuracy_out"], **outputs)
        result = {"rows": rows, "notes": ["cuDNN: a note"], "versions": {"nvidia-cudnn-frontend": "1.32.0", "fla-core": None}}
        pathlib.Path(spec["out"]).write_text(json.dumps(result))
        return types.SimpleNamespace(returncode=0, stderr="", stdout="")

    monkeypatch.setattr(subprocess, "run", run)


def test_rehearsal(bench, monkeypatch, capsys, tmp_path):
    play_peers(bench, monkeypatch)
    path = tmp_path / "out.json"
    options = ["--regimes", "slow channel", "--shapes", "96x8192", "--repeats", "1", "--stages", "--json", str(path)]
    bench.main(["--cpu-dry", *options])
    text = capsys.readouterr().out
    for line in ("REHEARSAL", "peers: nvidia-cudnn-frontend 1.32.0", "cuDNN: a note", "forward H=3 T=48", "wall, a layer of 2 H=3 T=48",
                 "forward+backward H=3 T=48", "walk summary", "first calls"):  # fmt: skip
        assert line in text, line
    assert "FAILED" not in text and "left out" not in text and " aim\n" not in text
    result = json.loads(path.read_text())
    rows = {row["kind"]: row for row in result["rows"]}
    assert list(rows) == ["forward", "layers", "both"] and all(row["ms"] > 0 and row["peer_ms"] == 0.5 for row in rows.values())
    assert rows["both"]["peer"] == "cuDNN bare" and rows["layers"]["minimum"] == pytest.approx(rows["layers"]["kernel"] * 1.05)
    floor = 3 * 48 * (1282 + 2308) * 16 / 128 / 4.3e12 * 1e3
    assert rows["both"]["floor_ms"] == pytest.approx(floor)
    errors = {row["who"]: row["errors"] for row in result["accuracy"]}
    assert set(errors) == {"ours", "cuDNN", "cuDNN bare"}
    assert set(errors["ours"]) == {"o", "state", *(f"d{name}" for name in bench.OPERANDS)} and max(errors["ours"].values()) < 5e-3
    assert max(*errors["cuDNN"].values(), *errors["cuDNN bare"].values()) < 1e-6
    stages = {row["stage"]: row for row in result["stages"]}
    assert len(stages) == 6 and all(row["error"] is None and row["ms"] > 0 for row in stages.values())


def test_a_failing_row_costs_only_itself(bench, monkeypatch, capsys):
    """Neither do the peers' absence (no such Python), nor a spent budget."""
    fail = lambda self, *args: (_ for _ in ()).throw(RuntimeError("CUDA_ERROR_LAUNCH_FAILED"))
    monkeypatch.setattr(bench.Shape, "measure", fail)
    options = ["--no-accuracy", "--peer-python", "/no/such/python", "--regimes", "near 0", "--shapes", "4x65536", "16x8192"]
    rows = bench.main(["--cpu-dry", *options])["rows"]
    text = capsys.readouterr().out
    assert "did not start" in text and text.count("FAILED, RuntimeError: CUDA_ERROR_LAUNCH_FAILED") == 3
    assert len(rows) == 3 and all("error" in row for row in rows)


def test_peers_figures_and_regimes(bench):
    assert bench.best_peer([], "forward", 96, 8192, "production") == (1.489, "FlashKDA*")
    assert bench.best_peer([], "both", 32, 65536, "near 0") == (23.8, "cuDNN bare*")
    assert bench.best_peer([], "forward", 4, 65536, "near 0") is None
    mine = {"peer": "cuDNN", "kind": "forward", "heads": 32, "tokens": 65536, "regime": "production"}
    assert bench.best_peer([mine | {"ms": 9.0}], "forward", 32, 65536, "production") == (8.164, "FlashKDA*")  # replaces 2.51
    assert bench.best_peer([mine | {"ms": 2.4}], "forward", 32, 65536, "production") == (2.4, "cuDNN")
    decay = lambda regime: -5 / (1 + np.exp(-(np.random.default_rng(0).normal(size=(1000, 1)) + bench.dt_bias(regime, 2, 4)[0])))
    assert abs(decay("production").mean() + 2.5) < 0.1 and decay("near 0").mean() > -0.01 and decay("saturated").mean() < -4.98
    slow = decay("slow channel")
    assert slow[:, 0].mean() > -1e-5 and abs(slow[:, 1:].mean() + 2.5) < 0.1


def test_stage_bytes(bench):
    """Bytes a token and head at K = V = 128 with gates in bfloat16: what each kernel must move."""
    import jax
    import jax.numpy as jnp
    import kda_kernels as stages  # pyright: ignore[reportMissingImports]

    heads, tokens = 2, 64
    wide = jnp.zeros((1, tokens, heads, 128), jnp.bfloat16)
    operands = (wide, wide, wide, wide, wide[..., 0], jnp.zeros(heads), jnp.zeros((heads, 128)))
    found = {}
    for name, function, args, skipped in stages.stages(stages.stand_in(), operands, -5.0):
        out = jax.eval_shape(function, *args)
        states = [x for x in jax.tree.leaves(out) if x.shape == (1, 1, heads, 128, 128)]  # initial and final states are no part of it
        small = [*states, *(operands[5:] if name in ("prep", "grads") else ())]  # nor are A_log and dt_bias
        found[name] = (stages.size(args) - stages.size(skipped) + stages.size(out) - stages.size(small)) / tokens / heads
    summary = found.pop("walk summary")
    assert found == {
        "prep": 1682, "walk forward": 1424, "walk both": 3984, "walk reverse": 1104, "grads": 4692.125,
    }  # fmt: skip
    assert summary == 848
