"""Distributions that are built from the checkout, and environments of them."""

import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from tests.kit.scripts import ROOT, inherited


def build(target: str, folder: Path, project: Path = ROOT) -> Path:
    """Build a distribution without a network; where it is.

    Args:
        target: ``"wheel"`` or ``"sdist"``.
        folder: where it is to be.
        project: the folder of its pyproject.toml.
    """
    subprocess.run(
        [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            target,
            "-d",
            folder,
        ],
        cwd=project,
        env=inherited(),
        check=True,
        capture_output=True,
        timeout=100,
    )
    (built,) = folder.iterdir()
    return built


def install_alone(wheel: Path, folder: Path) -> Path:
    """Make an environment of a wheel and what is installed here.

    The checkout is none of that: paths of editable installations are not read.

    Args:
        wheel: the wheel.
        folder: of the environment.

    Returns:
        Its Python.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    inside = next((folder / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(inside)
    others = "\n".join(site.getsitepackages())
    (inside / "others.pth").write_text(f"{others}\n")
    return python
