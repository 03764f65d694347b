"""What someone meets who installs and imports the package."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

import moejax

ROOT = pathlib.Path(moejax.__file__).parents[1]
HEAVY = ("grain", "orbax", "triton", "tokamax", "matplotlib", "PIL", "tyro", "tokenizers", "tensorflow", "torch")

PROBE = """
import sys, time
import jax, flax.linen, optax
start = time.perf_counter()
import moejax
print(time.perf_counter() - start)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def _probe() -> tuple[float, set[str]]:
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    seconds, names = result.stdout.splitlines()
    return float(seconds), set(names.split())


def test_import_is_light():
    """Nothing heavy at import, and under 1.5 s on top of jax, flax and optax (best of 3: the machine may be busy)."""
    best = float("inf")
    for _ in range(3):
        seconds, names = _probe()
        assert not names & set(HEAVY)
        best = min(best, seconds)
        if best < 1.5:
            break
    assert best < 1.5


def test_public_names_are_there():
    import moejax.ops
    import moejax.train

    for name in ("ModelConfig", "HybridLM", "presets", "__version__"):
        assert hasattr(moejax, name), name
    for name in ("TrainState", "make_train_step"):
        assert hasattr(moejax.train, name), name
    names = (
        "kda gated_kda kda_gate short_conv situ_glu attention_residual route quantile_bias margin_histogram "
        "bias_from_histogram sign_bias grouped_matmul"
    )
    for name in names.split():
        assert hasattr(moejax.ops, name), name


def test_version_and_typing_marker():
    assert moejax.__version__ == importlib.metadata.version("moejax")
    assert re.fullmatch(r"\d+\.\d+\.\d+", moejax.__version__)
    assert (pathlib.Path(moejax.__file__).parent / "py.typed").is_file()
    assert moejax.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_kernels_import_as_part_of_the_package():
    import moejax.kernels

    assert pathlib.Path(moejax.kernels.__path__[0]).resolve() == ROOT / "kernels"
    assert "kernels" not in sys.modules  # the top-level name belongs to another package


def test_kernels_know_nothing_of_moejax():
    """The performance-critical ops can be taken out of the package as they are: relative imports only."""
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for line in path.read_text().splitlines():
            assert not re.match(r"\s*(from|import)\s+moejax\b", line), f"{path.name}: {line}"


def test_imports_point_one_way():
    """kernels <- ops <- parallel <- modules <- train; config and presets may be read by all but kernels."""
    layers = ("ops", "parallel", "modules", "train")
    for index, layer in enumerate(layers):
        above = "|".join(layers[index + 1 :])
        if not above:
            continue
        for path in sorted((ROOT / "moejax" / layer).rglob("*.py")):
            for line in path.read_text().splitlines():
                bad = re.match(rf"\s*(from|import)\s+(\.\.|moejax\.)({above})\b", line)
                assert not bad, f"{path.relative_to(ROOT)}: {line}"


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert importlib.metadata.metadata("moejax")["License-Expression"] == "Apache-2.0"
