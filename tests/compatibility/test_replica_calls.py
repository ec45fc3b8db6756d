"""In replicas of towers, TensorFlow's calls return what it documents.

``tests/processes/own_loops.py`` runs the same table over ranks.
"""

import pytest

import keras_towers as kt
from tests.compatibility.replica_calls import assert_calls

STRATEGIES = {
    "one tower": lambda: kt.TowerStrategy(1),
    "towers": lambda: kt.TowerStrategy(3),
    "copies": lambda: kt.TowerStrategy(2, updates="each"),
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=[*STRATEGIES])
def test_calls(make):
    assert_calls(make())
