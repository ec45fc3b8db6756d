"""What ranks say when one of them is gone; else ``tests/processes``."""

import dataclasses

import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.ranks.call_agreement import _begin
from keras_towers.transport import SingleProcess

pytestmark = pytest.mark.core


class Left(SingleProcess):
    """A transport of one's own, whose other rank has ended."""

    size = 2

    def gather_objects(self, value):
        raise tf.errors.UnavailableError(None, None, "connection reset")

    def ended_ranks(self):
        return "rank 1 has ended"


def test_a_rank_that_has_ended_is_named_over_any_transport():
    config = kt.TowerStrategy(2)._config
    config = dataclasses.replace(config, job=Left(), transport=Left())
    with pytest.raises(kt.TowerError, match="rank 1 has ended, and does not c"):
        _begin(config, "fit", lambda: Left().gather_objects(None))
