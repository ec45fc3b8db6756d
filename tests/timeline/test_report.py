"""What is printed of a ``fit``."""

import io

import numpy as np
import pytest
from rich.console import Console

from keras_towers.timeline import report
from keras_towers.timeline.measured import Measured

pytestmark = pytest.mark.core


def printed(measured, advice=()):
    file = io.StringIO()
    report.show(Console(file=file, width=100), "a fit", measured, {}, advice)
    lines = file.getvalue().splitlines()
    return [line.split("  ") for line in lines], lines


def cells(measured, name):
    rows, _ = printed(measured)
    found = [[c.strip() for c in row if c.strip()] for row in rows]
    (row,) = [row for row in found if row and row[0] == name]
    return row[1:]


def test_means_and_medians_and_what_is_rare():
    measured = Measured(
        {"compute": 0.04, "callbacks": 0.06},
        np.empty(0),
        medians={"compute": 0.03, "callbacks": 0.00003},
    )
    assert cells(measured, "compute") == ["40.00", "30.00", "40%"]
    rare = ["60.00", "0.03", "60%", "every so often"]
    assert cells(measured, "callbacks") == rare
    assert cells(measured, "a step") == ["100.00"]


def test_how_much_of_fit_there_is():
    seconds = {
        "steps": 0.75,
        "tracing": 0.0,
        "validation": 0.5,
        "ends of epochs": 1.5,
    }
    measured = Measured({}, np.empty(0), seconds=seconds, whole=3.25)
    _, lines = printed(measured, ["do less."])
    assert lines == [
        "a fit",
        "steps: 0.75 of 3.25 s of fit",
        "validation: 0.50 s",
        "ends of epochs: 1.50 s",
        "- do less.",
    ]
