"""What tests of the benchmark share."""

from typer.testing import CliRunner

from keras_towers.cli.main import app
from keras_towers.inspection.bench.runner import Cell, Sample

FACTS = {
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "python": "3.13.0",
    "platform": "Linux",
    "processor": "a processor",
    "cores": 2,
    "gpus": [],
}
# What a process leaves.
RANK = {
    "first_step_s": 1.5,
    "losses": [2.0, 1.0],
    "step_ms": 1.0,
    "memory_mb": 10.0,
    "memory_to_state": 1.5,
}


def invoke(*arguments):
    """Run ``keras-towers bench`` in this process."""
    return CliRunner().invoke(app, ["bench", *arguments])


def samples_of(rows, replicas=2):
    """Samples of rows; plain Keras has one replica.

    Args:
        rows: the milliseconds of a row's steps, by repeat; a text: the error.
        replicas: how many.
    """
    samples = []
    for row, repeats in rows.items():
        for repeat, found in enumerate(repeats):
            count = 1 if row.startswith("plain") else replicas
            cell = Cell("large", row, count, repeat)
            if isinstance(found, str):
                samples.append(Sample(cell, error=found))
                continue
            result = {**RANK, "step_ms": found}
            samples.append(Sample(cell, result))
    return samples
