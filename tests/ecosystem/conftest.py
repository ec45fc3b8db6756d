"""What the tools of other packages leave behind is cleared away."""

import keras
import pytest


@pytest.fixture(autouse=True)
def methods_as_before(monkeypatch):
    """Undo what a library sets on the class of all models."""
    for name in ("fit", "evaluate", "predict"):
        monkeypatch.setattr(
            keras.Model, name, getattr(keras.Model, name), raising=False
        )
