"""Batches that are copied to GPUs while these compute."""

import pytest

from tests.fit.data.prefetched import (
    assert_drawn_ahead,
    assert_strings_are_exact,
)
from tests.fit.data.test_inputs import fitting
from tests.gpu.towers import TOLERANCE, strategy, towers
from tests.kit.compare import assert_exact
from tests.kit.training import compiled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "source", ["numpy", "tf.data", "unknown length", "PyDataset", "generator"]
)
@pytest.mark.parametrize("batches", ["split", "each"])
def test_every_source(source, batches):
    more = 1 if batches == "split" else len(towers())
    steps = {"steps_per_epoch": 3} if source == "generator" else {}
    assert_exact(
        compiled(),
        fitting(source, 4, epochs=1, **steps),
        strategy(batches=batches),
        fitting(source, 4 * more, epochs=1, **steps),
        tolerance=TOLERANCE,
    )


def test_strings_stay_on_the_host():
    assert_strings_are_exact(strategy(), tolerance=TOLERANCE)


def test_the_next_batch_is_drawn_while_this_one_computes():
    assert_drawn_ahead(strategy())
