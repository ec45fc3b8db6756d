"""Planning the field."""

import pytest

from keras_towers.bench.field import rows
from keras_towers.bench.field.plan import FieldCell, plan_field
from keras_towers.bench.field.runner import environment

pytestmark = pytest.mark.core


def test_row_is_measured_with_what_its_figures_are_relative_to():
    cells = plan_field(["small"], ["torch-ddp", "towers"], [2, 4], 2)
    each = [
        ("keras-tensorflow", 1),
        ("keras-torch", 1),
        *(
            (row, count)
            for count in (2, 4)
            for row in (
                *("torch-ddp", "towers"),
                *("compute-tensorflow", "compute-torch"),
            )
        ),
    ]
    assert cells == [
        FieldCell("small", row, count, repeat)
        for repeat in (0, 1)
        for row, count in each
    ]


def test_one_device_is_compared_with_the_reference_only():
    cells = plan_field(["a", "b"], ["keras-jax"], [2], 1)
    assert [(cell.model, cell.row) for cell in cells] == [
        (model, row)
        for model in ("a", "b")
        for row in ("keras-tensorflow", "keras-jax")
    ]


def test_row_that_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    find = {"torch": None, "jax": "found", "horovod": None}.get
    monkeypatch.setattr(rows.importlib.util, "find_spec", find)
    able, missing = rows.split(["torch-ddp", "keras-jax", "horovod-raw"])
    assert able == ["keras-jax"]
    assert missing == {
        "torch-ddp": "torch is not installed: run "
        "`pip install 'keras-towers[field]'`",
        "horovod-raw": "horovod is not installed: run "
        "`keras-towers install horovod`",
    }


def test_processes_and_titles():
    cells = [
        FieldCell("small", "keras-jax", 1, 0),
        FieldCell("small", "jax-data-parallel", 4, 0),
        FieldCell("my:build", "compute-jax", 4, 0),
    ]
    assert [cell.processes for cell in cells] == [1, 1, 4]
    assert [cell.title for cell in cells] == [
        "small, 1 device, keras-jax",
        "small, 4 devices, jax-data-parallel",
        "my:build, 4 processes, compute-jax",
    ]
    # JAX splits a CPU into devices, but only where one process has several.
    flags = [environment(cell, "cpu")["XLA_FLAGS"] for cell in cells]
    assert [flag.split()[0].rpartition("=")[2] for flag in flags] == list("141")
    assert environment(cells[0], "gpu") == {"KERAS_BACKEND": "jax"}
