"""What `make test` draws of many cases: another seed draws others."""

import os

VARIABLE = "KERAS_TOWERS_TEST_SEED"
# Such as the date.
SEED = int(os.environ.get(VARIABLE, "1"))


def header() -> str:
    """A line for the header of a run of pytest."""
    return f"drawn cases: {VARIABLE}={SEED}"
