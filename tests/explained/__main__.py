"""Writes what is said of the steps."""

import tests.conftest  # noqa: F401  # The devices of all tests.
from tests.explained.steps import FOLDER, STEPS, VERSIONS, explained, file_of

for step in STEPS:
    file_of(step).write_text(explained(step))
(FOLDER / "versions.txt").write_text(f"{VERSIONS}\n")
