"""Writes what towers have of the results of each operation."""

import tests.conftest  # noqa: F401  # The devices of all tests.
from tests.partition.rules.test_rules import CASES, LAYOUTS, line_of

LAYOUTS.write_text("".join(f"{line_of(case)}\n" for case in CASES))
