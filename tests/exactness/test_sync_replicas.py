"""Replicas that average R gradients give what one device gives with R batches.

A case's batch of one device is R batches here. That is the same for what is a
mean over the examples of a batch, and for batches of the same size.
"""

import functools

import pytest

import keras_towers as kt
from tests.exactness.cases import CASES
from tests.exactness.contract import assert_contract
from tests.kit.long import long_but

# A batch as a whole is more than the mean of its parts; or the last one is of R
# batches of different size; or Keras weights the loss of each output by
# batches. And eager steps are refused.
_OTHERS = (
    "batch-not-divisible",
    "last-batch-of-two",
    "validation-split",
    "several-losses",
    "all-batches-of-one",
    "sync-batch-norm",
    "regularizers",
    "sum-loss",
    "mean-with-sample-weight-loss",
    "mask",
    "contrastive",
    "clipped-by-hand",
    "gradients-by-hand",
    "eager",
)
NAMES = [name for name in CASES if name not in _OTHERS]
KEPT = (
    "accumulation",
    "embedding-clipped",
    "ema-overwrite",
    "gan",
    "loss-scale-overflow",
    "mixed-float16",
    "validation",
)
# Their number of examples is that of whole updates.
FOUR = [
    ("adam", 4),
    ("embedding-clipped", 2),
    ("ema", 3),
    ("loss-scale-overflow", 1),
    ("adam", 3),
    ("embedding-clipped", 4),
    ("ema", 2),
    ("loss-scale-overflow", 4),
]
KEPT_OF_FOUR = FOUR[:3]


class Smaller:
    """Fits a model with batches of a fraction of the size."""

    def __init__(self, parts, model):
        self.parts = parts
        self.model = model

    def fit(self, *args, batch_size, **kwargs):
        return self.model.fit(
            *args, batch_size=batch_size // self.parts, **kwargs
        )


@pytest.mark.parametrize("name", long_but(lambda name: name in KEPT, NAMES))
def test_case_on_two_replicas(name):
    smaller = functools.partial(Smaller, 2)
    strategy = kt.SyncReplicasStrategy(2, 2)
    assert_contract(name, strategy, seen_by_fit=smaller)


@pytest.mark.parametrize(
    "name, replicas", long_but(lambda case: case in KEPT_OF_FOUR, FOUR)
)
def test_four_gradients_an_update(name, replicas):
    strategy = kt.SyncReplicasStrategy(4, replicas)
    smaller = functools.partial(Smaller, 4)
    assert_contract(name, strategy, seen_by_fit=smaller)
