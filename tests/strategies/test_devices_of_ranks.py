"""Which GPUs of its machine a rank takes; no GPU is needed."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.rendezvous import OWN_GPUS
from keras_towers.strategies.processes import devices_of_rank

pytestmark = pytest.mark.core

SECOND = SimpleNamespace(rank=1, local_rank=1)


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, which TensorFlow has not started to use."""
    there = ["first", "second"]
    visible = []
    for name, stand_in in {
        "list_physical_devices": lambda kind: there,
        "set_visible_devices": lambda mine, kind: visible.extend(mine),
        "get_visible_devices": lambda kind: visible,
    }.items():
        monkeypatch.setattr(tf.config, name, stand_in)
    return SimpleNamespace(there=there, visible=visible)


def test_by_local_rank(gpus):
    assert devices_of_rank(SECOND, 1) == [0]
    assert gpus.visible == ["second"]
    with pytest.raises(TowerError, match="its machine has only 2"):
        devices_of_rank(SECOND, 2)


def test_a_launcher_that_shows_each_rank_its_own(gpus, monkeypatch):
    """Those of local rank 1 are the first that it sees."""
    monkeypatch.setenv(OWN_GPUS, "1")
    del gpus.there[0]
    assert devices_of_rank(SECOND, 1) == [0]
    assert gpus.visible == ["second"]
