"""What steps log."""

import logging
from collections.abc import Callable

import pytest

from keras_towers.fit import told


@pytest.fixture
def logged(monkeypatch, caplog) -> Callable[[str], list[tuple[str, str]]]:
    """The messages of a test with some text, and their levels."""
    # What was said before is said again.
    monkeypatch.setattr(told, "_said", set())
    caplog.set_level(logging.INFO, "keras_towers")
    return lambda text: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if text in record.getMessage()
    ]
