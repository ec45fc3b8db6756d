"""Writes what towers have of the results of each operation."""

import tests.conftest  # noqa: F401  # The devices of all tests.
from tests.partition.rules.test_rules import CASES, LAYOUTS, VERSION, line_of

lines = [VERSION, *map(line_of, CASES)]
LAYOUTS.write_text("".join(f"{line}\n" for line in lines))
