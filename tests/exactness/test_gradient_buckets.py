"""Cases whose gradients are exchanged while the backward pass goes on."""

import functools
import itertools

import pytest

import keras_towers as kt
from keras_towers.inspection.conformance.cases import CASES, HARDEST
from keras_towers.partition.timeline import gradient_buckets
from tests.exactness.contract import assert_contract
from tests.exactness.ways import MOST_UNLIKE
from tests.kit.sampling import sample_of

WAYS = {
    "towers": kt.TowerStrategy,
    "each": functools.partial(kt.TowerStrategy, updates="each"),
    "in shares": functools.partial(kt.TowerStrategy, updates="sharded"),
    "in shares, collective": functools.partial(
        kt.TowerStrategy, updates="sharded", mode="collective"
    ),
    "in shards": functools.partial(
        kt.TowerStrategy, weights="sharded", gather_bytes=2000
    ),
    "computed again": functools.partial(
        kt.TowerStrategy, updates="sharded", remat=True
    ),
    "served": kt.ParameterServerTowerStrategy,
}
# Those that compile functions of their own take much longer.
_XLA = ("towers",)
_FIRST = [(name, "in shares") for name in HARDEST]
_REST = [
    *((name, "in shares") for name in CASES if name not in HARDEST),
    *itertools.product(MOST_UNLIKE, [w for w in WAYS if w != "in shares"]),
]


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch):
    """Lets exchanges be of few bytes, as if models were large."""
    monkeypatch.setattr(gradient_buckets, "_BUCKET_BYTES", 64)
    monkeypatch.setattr(gradient_buckets, "_MOST_BUCKETS", 1000)


@pytest.mark.parametrize("name, way", [*_FIRST, *sample_of(_REST, 20)])
def test_case(name, way, small_shards):
    assert_contract(name, WAYS[way](2), xla=way in _XLA)
