"""Writes what is said of the steps."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_towers as kt

kt.virtual_towers(8)

from tests.explained.steps import FOLDER, STEPS, VERSIONS, explained, file_of

for step in STEPS:
    file_of(step).write_text(explained(step))
(FOLDER / "versions.txt").write_text(f"{VERSIONS}\n")
