"""Where a trace is written to."""

import pytest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"
