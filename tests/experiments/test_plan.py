"""The planner's command line, and what happens around a compile for a TPU that is not there."""

import importlib.util

import pytest

from experiments import compile_for_tpu, plan

SMALL = ["--preset", "small", "--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.expert", "8", "--mesh.sequence", "2", "--mesh.tensor", "2"]


def test_a_plan_that_fits(capsys):
    assert plan.main([*SMALL, "--topology", "v5p:4x4x8", "--batch", "30"]) == 0
    text = capsys.readouterr().out
    for line in (
        "128 devices; mesh: data 2, fsdp 2, expert 8, sequence 2, tensor 2",
        "30 rows of 8,192 tokens; a device has 1 of 4,096",
        "parameters                                │ 118.6 MiB",
        "optimizer (float32 moments)               │ 237.2 MiB",
        "KDA recurrence",
        "experts' rows (ragged)",
        "note: 30 rows over data x fsdp x expert = 32: 2 rows of padding are computed.",
        "fits: ",
    ):
        assert line in text, line


def test_a_plan_that_does_not_fit(capsys):
    """Kimi K3 at a million tokens: what is too large, and that no mesh of these chips trains it."""
    k3 = ["--preset", "kimi_k3", "--context", str(2**20), "--topology", "v5p:8x16x16"]
    mesh = ["--mesh.fsdp", "8", "--mesh.expert", "128", "--mesh.sequence", "2"]
    assert plan.main([*k3, *mesh]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "does not fit: " in text and "times the 90.94 GiB that v5p has" in text
    assert "no mesh of 2,048 devices fits 1024 rows of 1,048,576 tokens" in text
    assert plan.main([*k3, "--optimizer", "none", "--mesh.sequence", "16", "--mesh.expert", "128", "--batch", "128"]) == 1  # float32
    text = " ".join(capsys.readouterr().out.split())
    assert "cache: MLA latents │ 1.7 GiB" in text and "bytes a device sends" not in text
    assert "would fit: several axes: --mesh" in text and "would fit: mesh.fsdp 1 -> 4 (cuts rows and weights; 8,192 devices)" in text
    packed = ["--param-dtype", "bfloat16", "--expert-weights", "mxfp4"]
    packed += ["--mesh.expert", "128", "--mesh.sequence", "4", "--mesh.tensor", "4"]
    assert plan.main([*k3, "--optimizer", "none", "--batch", "128", *packed]) == 0
    assert plan.main([*k3, *packed]) == 1 and "read-only experts" in capsys.readouterr().out
    assert plan.main([*SMALL, "--topology", "v5p:4x4x4", "--mesh.tensor", "3"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "kda.heads is 8, and mesh.tensor cuts it into 3 parts: set mesh.tensor to 2 or 4." in text
    assert "the mesh has 192 devices, v5p:4x4x4 has 64" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology", "v5q:2x2"], "unknown chip 'v5q'"),
        (["--topology", "v5p:4x4x8", "--batch", "0"], "rows is 0"),
        (["--topology", "h200:128", "--compile"], "h200 is none"),
        (["--topology", "v5p:4x4x8", "--compile", "--optimizer", "none"], "--optimizer none has none"),
        (["--topology", "v5p:4x4x8", "--hlo", "x"], "give --compile, too"),
        (["--topology", "v5p:4x4x4", "--compile"], "not compiled: memory is not all"),
    ],
)
def test_bad_input(capsys, arguments, message):
    assert plan.main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1


def test_the_comparison_with_a_compiled_step(capsys, monkeypatch):
    """Planner and XLA side by side, from the answer that the subprocess gives."""
    asked = {}

    def answer(request, *, timeout):
        asked.update(request, timeout=timeout)
        return {
            "lower_seconds": 46.1,
            "compile_seconds": 897.8,
            "cpu_seconds": 330.0,
            "memory": {"argument": 375700992, "output": 0, "alias": 0, "temp": 781451264, "generated_code": 335431168},
            "flops": 3.294e11,
            "bytes_by_axis": {"expert": 2069900875.0, "data": 8388608.0},
            "versions": {"jax": "0.12.0", "python": "3.12.1"},
        }

    monkeypatch.setattr(plan, "compile_for_tpu", answer)
    assert plan.main([*SMALL, "--topology", "v5p:4x4x8", "--compile", "--compile-minutes", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert asked["timeout"] == 120 and asked["mesh"]["expert"] == 8 and asked["config"]["dtype"] == "bfloat16" and asked["batch"] == 32
    assert "compiled in 897.8 s (330 CPU seconds in all; jax 0.12.0, python 3.12.1)" in text
    for cells in ("373,137,780 B │ 375,700,992 B", "745.2 MiB", "bytes over expert │ 1.8 GiB │ 1.9 GiB", "bytes over data │ 0 B │ 8.0 MiB"):
        assert cells in text, cells

    def refuse(request, *, timeout):
        raise compile_for_tpu.CompileError("the train step did not compile:\nRESOURCE_EXHAUSTED")

    monkeypatch.setattr(plan, "compile_for_tpu", refuse)
    assert plan.main([*SMALL, "--topology", "v5p:4x4x8", "--compile"]) == 1
    assert capsys.readouterr().err == "error: the train step did not compile:\nRESOURCE_EXHAUSTED\n"


MESH = dict.fromkeys(("data", "fsdp", "expert", "sequence", "tensor"), 1)
REQUEST = {"config": {}, "mesh": MESH, "topology": "v9:1", "batch": 1, "context": 8}


def test_the_subprocess_says_what_is_wrong():
    """It runs the module with the environment of a machine without a TPU, and its own words come back."""
    assert compile_for_tpu.environment()["TPU_SKIP_MDS_QUERY"] == "1"
    with pytest.raises(compile_for_tpu.CompileError, match=r"no topology 'v9:1': .*tpu-aot"):
        compile_for_tpu.compile_for_tpu({**REQUEST, "attention": "gather", "transport": None}, timeout=120)
    with pytest.raises(compile_for_tpu.CompileError, match="not compiled in 0 s"):
        compile_for_tpu.compile_for_tpu(REQUEST, timeout=0.01)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu-aot)")
def test_a_compile_for_four_chips(capsys):
    """`tiny` over experts and time on v5e:2x2; about 3 minutes."""
    mesh = ["--mesh.expert", "2", "--mesh.sequence", "2", "--remat", "full"]
    assert plan.main(["--preset", "tiny", *mesh, "--topology", "v5e:2x2", "--context", "512", "--compile"]) == 0
    text = capsys.readouterr().out
    assert "compiled in" in text and "bytes over expert" in text
