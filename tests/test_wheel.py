"""The wheel: `moejax/kernels` is a link in the tree and must be a folder of files in what people install."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
IMPORT = "import moejax, moejax.kernels.kda; print(moejax.__file__); print(moejax.kernels.kda.__file__)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources, so that no build folder is left in the tree; fetches setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("moejax", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "-w", str(folder / "dist")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_kernels_and_typing_marker_are_real_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for name, entry in entries.items():
            assert not stat.S_ISLNK(entry.external_attr >> 16), name
        for name in ("moejax/kernels/kda/api.py", "moejax/kernels/common.py", "moejax/py.typed"):
            assert archive.read(name) == (ROOT / name).read_bytes(), name
    packed = {name for name in entries if name.startswith("moejax/") and name.endswith(".py")}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "moejax").rglob("*.py")}
    files |= {f"moejax/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "kernels").rglob("*.py")}
    assert packed == files
    # Tests, experiments and a top-level `kernels` (the name of another package) stay out.
    assert {name.split("/")[0] for name in entries} == {"moejax", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


def test_unpacked_wheel_imports_its_own_kernels(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    site.mkdir()
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    result = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=elsewhere, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        assert pathlib.Path(line).is_relative_to(site), line
    assert len(result.stdout.splitlines()) == 2
