"""The wheel adds files to the installed package and overwrites none of upstream's."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"  # a build leaves files in its tree
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "python"):
        subprocess.run(["cp", "-r", ROOT / name, source], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", directory, source],
        check=True,
    )
    (wheel,) = directory.glob("sglang_guidance_buckets-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_no_file_of_upstreams_is_overwritten(wheel_files):
    upstream = {str(path) for path in importlib.metadata.files("sglang")}
    assert upstream & wheel_files == set()
    assert any(path.endswith("pipelines_core/stages/denoising.py") for path in upstream)


def test_every_file_is_in_it(wheel_files):
    ours = {
        str(path.relative_to(ROOT / "python"))
        for path in (ROOT / "python").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert ours == {path for path in wheel_files if path.endswith(".py")}


def test_the_installed_files_are_these(wheel_files):
    """What the other tests run is this checkout: `make test` installs it first."""
    for path in importlib.metadata.files("sglang-guidance-buckets"):
        if path.suffix == ".py":
            assert path.read_text() == (ROOT / "python" / path).read_text(), path
