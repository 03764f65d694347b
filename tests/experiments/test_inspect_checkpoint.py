"""The table of a published checkpoint, and --verify."""

import os
import shutil
import subprocess
import sys

import pytest

from moejax import hub, presets
from moejax.counting import count_parameters
from moejax.hub.published_config import read_config


def run(root, *arguments):
    command = [sys.executable, "-m", "experiments.inspect_checkpoint", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "140"})


def test_table_and_verification(pytestconfig, tmp_path):
    root = pytestconfig.rootpath
    golden = root / "tests" / "golden" / "k3_tiny"
    done = run(root, golden, "--verify")
    assert done.returncode == 0, done.stderr
    assert "layer 3" in done.stdout and "MLA, 16 experts, 4 a token" in done.stdout and "KDA, dense" in done.stdout
    config, vision = hub.load(golden).config, hub.vision_inventory(read_config(golden).vision)
    biases, padding = 7 * 16, 6 * 124  # of MoE layers, of A_log
    values = count_parameters(config).total + biases + padding + sum(spec.size for spec in vision.values())
    assert "908" in done.stdout and f"{values:,}" in done.stdout  # tensors; experts' values, not their bytes
    assert "every name, shape and dtype is as expected" in done.stdout
    done = run(root, golden, "--verify", "--preset", "kimi_k3", "--most", "3")
    assert done.returncode == 1 and "differences from preset kimi_k3" in done.stdout and "more (--most N shows more)" in done.stdout
    done = run(root, golden, "--preset", "kimi_k3")
    assert done.returncode == 2 and "give --verify, too" in done.stderr
    for path in golden.glob("model*"):
        shutil.copy(path, tmp_path / path.name)
    done = run(root, tmp_path)
    assert done.returncode == 2 and "config.json is missing" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_whole_of_K3_without_its_bytes(pytestconfig, tmp_path, sparse_checkpoint):
    """96 files with K3's real headers, 1.56 TB of holes: names and shapes are checked in seconds."""
    sparse_checkpoint(presets.get("kimi_k3"), tmp_path, files=96, vision=hub.PUBLISHED_VISION)
    done = run(pytestconfig.rootpath, tmp_path, "--verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified against preset kimi_k3" in done.stdout and "497,220" in done.stdout
