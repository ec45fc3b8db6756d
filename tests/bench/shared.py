"""What tests of the benchmark share."""

from typer.testing import CliRunner

from keras_towers.bench.plan import Cell
from keras_towers.bench.runner import Sample
from keras_towers.cli.main import app

FACTS = {
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "python": "3.13.0",
    "platform": "Linux",
    "processor": "a processor",
    "cores": 2,
    "gpus": [],
}


# What a process of the field leaves.
FIELD_RANK = {
    "step_ms": [1.0],
    "first_losses": [2.0, 1.0],
    "frozen_losses": [2.0, 2.0],
    "witness": [0.5],
    "first_step_s": 1.5,
    "memory_mb": 10.0,
    "epoch_cost_s": None,
    "choice": None,
}


def invoke(*arguments):
    """Run ``keras-towers bench`` in this process."""
    return CliRunner().invoke(app, ["bench", *arguments])


def samples_of(suite, rows, replicas=2, **more):
    """Samples of rows.

    Args:
        suite: theirs.
        rows: of each the milliseconds of its steps, by repeat, or all that is
            measured; a text: the error.
        replicas: how many.
        more: of each result.
    """
    samples = []
    for row, repeats in rows.items():
        for repeat, found in enumerate(repeats):
            cell = Cell(suite.kind, "large", row, replicas, repeat)
            if isinstance(found, str):
                samples.append(Sample(cell, error=found))
                continue
            result = {"step_ms": [1.0], "epoch_cost_s": 0.1, **more}
            result |= found if isinstance(found, dict) else {"step_ms": found}
            samples.append(Sample(cell, result))
    return samples


ADOPTION = [
    Sample(
        Cell("adoption", "adoption", "towers", 2, 0),
        {
            "bytes": 1e8,
            "adopt_s": [9.0, 1.0, 3.0, 2.0],
            "release_s": [1.0, 2.0, 3.0, 4.0],
            "copy_s": [0.5, 0.5, 0.25, 0.75],
        },
    ),
    Sample(Cell("adoption", "adoption", "async", 2, 0), error="[bad]"),
]
