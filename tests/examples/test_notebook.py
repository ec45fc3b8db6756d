"""The notebook runs as it stands, in a kernel of its own."""

import os
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "towers.ipynb"


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(notebook):
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return "".join(o["text"] for o in outputs if o.get("name") == "stdout")


def check(notebook):
    """Both trainings learn, and the weights of both are the same."""
    text = printed(notebook)
    assert "is safe to split" in text
    difference = re.search(r"largest difference of a weight: (\S+)", text)
    # Rounding, after hundreds of steps.
    assert float(difference[1]) < 1e-3
    assert float(re.search(r"accuracy ([\d.]+)%", text)[1]) > 95


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    )
    # It draws: tests/kit/lean.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    notebook = read()
    nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    check(notebook)


def test_what_it_shows_is_fit_to_be_seen():
    notebook = read()
    check(notebook)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert all(o.get("name") != "stderr" for o in outputs)
    assert all(o.output_type != "error" for o in outputs)
    assert not re.search(r"/(home|root|tmp|Users)/", NOTEBOOK.read_text())
