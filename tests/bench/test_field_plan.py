"""Planning the field."""

import pytest

from keras_towers.bench.field import rows
from keras_towers.bench.field.plan import FieldCell, plan_field
from keras_towers.bench.field.runner import environment


def test_row_is_measured_with_what_its_figures_are_relative_to():
    cells = plan_field(["a"], ["torch-ddp", "towers"], [2, 4], 2)
    ranks = ["torch-ddp", "towers", "compute-tensorflow", "compute-torch"]
    each = [("keras-tensorflow", 1), ("keras-torch", 1)]
    each += [(row, count) for count in (2, 4) for row in ranks]
    assert cells == [
        FieldCell("a", row, count, repeat)
        for repeat in (0, 1)
        for row, count in each
    ]
    # One device is compared with the reference only.
    cells = plan_field(["a"], ["keras-jax"], [2], 1)
    assert [cell.row for cell in cells] == ["keras-tensorflow", "keras-jax"]


def test_row_that_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    find = {"torch": None, "jax": "found", "horovod": None}.get
    monkeypatch.setattr(rows.importlib.util, "find_spec", find)
    able, missing = rows.split(["torch-ddp", "keras-jax", "horovod-raw"])
    assert able == ["keras-jax"]
    assert "pip install 'keras-towers[field]'" in missing["torch-ddp"]
    assert "keras-towers install horovod" in missing["horovod-raw"]


@pytest.mark.parametrize(
    ("row", "processes", "flag", "title"),
    [
        # JAX splits a CPU into devices, where one process has several.
        ("jax-data-parallel", 1, "4", "small, 4 devices, jax-data-parallel"),
        ("compute-jax", 4, "1", "small, 4 processes, compute-jax"),
    ],
)
def test_processes_and_titles(row, processes, flag, title):
    cell = FieldCell("small", row, 4, 0)
    assert cell.processes == processes
    assert cell.title.startswith(title)
    flags = environment(cell, "cpu")["XLA_FLAGS"].split()
    assert flags[0].rpartition("=")[2] == flag
    assert environment(cell, "gpu") == {"KERAS_BACKEND": "jax"}
