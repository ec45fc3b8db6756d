"""What commands set for their process."""

import pytest

from keras_towers.transport import devices


@pytest.fixture(autouse=True)
def own_towers(monkeypatch):
    """``verify`` splits the CPU, which other tests have split already."""
    monkeypatch.setattr(devices, "_made", list(devices._made))
