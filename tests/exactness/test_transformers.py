"""Random layers of transformers draw what they draw on one device.

Keras may compute ``Dense`` on inputs of rank 3 by ``tf.tensordot``: which
dimension of its output has the examples is then computed in the graph.
"""

import functools

import pytest

import keras_towers as kt
from tests.exactness import transformers as t
from tests.kit.compare import assert_exact
from tests.kit.long import long_but

KEPT = (("smallest", 2), ("smallest", 3), ("vit", 2), ("bert", 3))


@pytest.mark.parametrize(
    "name, towers",
    long_but(KEPT.__contains__, [(n, k) for n in t.MODELS for k in (2, 3)]),
)
def test_towers(name, towers):
    assert_exact(
        functools.partial(t.make, name),
        functools.partial(t.train, name),
        kt.TowerStrategy(towers, exact=True),
        tolerance=4e-6,
    )
