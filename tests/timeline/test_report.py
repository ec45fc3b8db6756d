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
    return file.getvalue().splitlines()


def test_means_and_medians_and_what_is_rare():
    phases = {"compute": 0.04, "callbacks": 0.06}
    medians = {"compute": 0.03, "callbacks": 0.00003}
    lines = printed(Measured(phases, np.empty(0), medians=medians))
    for row in (
        ["compute", "40.00", "30.00", "40%"],
        ["callbacks", "60.00", "0.03", "60%", "every", "so", "often"],
        ["a", "step", "100.00"],
    ):
        assert row in [line.split() for line in lines]


def test_how_much_of_fit_there_is():
    seconds = {"steps": 0.75, "tracing": 0.0, "validation": 0.5}
    measured = Measured({}, np.empty(0), seconds=seconds, whole=3.25)
    assert printed(measured, ["do less."]) == [
        "a fit",
        "steps: 0.75 of 3.25 s of fit",
        "validation: 0.50 s",
        "- do less.",
    ]
