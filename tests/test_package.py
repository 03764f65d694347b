"""What someone meets who installs and imports the package."""

import ast
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


# What each part may read of the package, beside itself.
READS = {
    "config": set(),
    "shapes": {"config"},
    "counting": {"config", "shapes"},
    "presets": {"config", "counting"},
    "data": set(),
    "ops": {"config", "kernels"},
    "parallel": {"config", "kernels", "ops"},
    "planning": {"config", "counting", "shapes", "parallel"},
    "modules": {"config", "kernels", "ops", "parallel"},
    "hub": {"config", "presets", "ops", "parallel", "modules"},
    "train": {"config", "counting", "presets", "data", "kernels", "ops", "parallel", "modules", "__version__"},
    "infer": {"config", "shapes", "kernels", "ops", "parallel", "modules"},
    "evals": {"config", "data", "infer", "modules", "train"},
}


def _reads(source: str, package: tuple[str, ...]) -> set[str]:
    """Names directly below moejax that a module of `package` (("moejax", "ops"), say) imports, in any form."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            names = [(*base, alias.name) for alias in node.names]
        else:
            continue
        found |= {name[1] if len(name) > 1 else "everything" for name in names if name[0] == "moejax"}
    return found


def test_imports_point_one_way():
    """kernels <- ops <- parallel <- modules <- data <- train, hub; data reads nothing, config may be read by all but kernels and data."""
    parts = {path.stem for path in (ROOT / "moejax").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert parts - {"__init__", "kernels"} == set(READS)
    for part, allowed in READS.items():
        folder = ROOT / "moejax" / part
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
            package = path.relative_to(ROOT).parent.parts
            bad = _reads(path.read_text(), package) - allowed - {part}
            assert not bad, f"{path.relative_to(ROOT)} imports {', '.join(sorted(bad))}"


def test_every_form_of_an_import_is_seen():
    package = ("moejax", "ops")
    forms = ("from .. import train", "from ..train import x", "from ..train.state import x", "import moejax.train.state")
    for form in (*forms, "from moejax import train", "from moejax.train import x", "def f():\n    from .. import train as t"):
        assert _reads(form, package) == {"train"}, form
    assert _reads("import moejax", package) == {"everything"}
    assert _reads("from . import routing\nfrom .gates import x\nimport jax", package) == {"ops"}
    assert _reads("from ... import train", (*package, "deeper")) == {"train"}


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert importlib.metadata.metadata("moejax")["License-Expression"] == "Apache-2.0"
