"""Shared test set-up: 8 forced CPU devices, and a loader for the golden vectors in tests/golden."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden():
    """golden("kda/prod_T17.npz") -> {name: numpy array}."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / name) as file:
            return {key: file[key] for key in file.files}

    return load


@pytest.fixture
def x64():
    """Run one test with float64 enabled."""
    import jax

    with jax.enable_x64(True):
        yield
