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


def outputs_of(notebook):
    """All outputs, of two trainings that learn and have the same weights."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    text = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
    assert "is safe to split" in text
    difference = re.search(r"largest difference of a weight: (\S+)", text)
    # Rounding, after hundreds of steps.
    assert float(difference[1]) < 1e-3
    assert float(re.search(r"accuracy ([\d.]+)%", text)[1]) > 95
    return outputs


# What it shows is tried by the examples that are scripts.
@pytest.mark.long
@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", paths)
    # It draws: tests/kit/lean.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    assert outputs_of(notebook)


def test_what_it_shows_is_fit_to_be_seen():
    for output in outputs_of(nbformat.read(NOTEBOOK, as_version=4)):
        assert output.get("name") != "stderr"
        assert output.output_type != "error"
    assert not re.search(r"/(home|root|tmp|Users)/", NOTEBOOK.read_text())
