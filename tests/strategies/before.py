"""A model before an error, and whether that has left it as it was."""

import keras
import numpy as np

from keras_towers.inspection.conformance.outcomes import Originals
from tests.kit.compare import weights_of

APPLY = keras.optimizers.SGD.apply


class Before(Originals):
    """The variables of a model, and what they hold."""

    def __init__(self, model: keras.Model):
        super().__init__(model)
        self.weights = weights_of(model)

    def assert_still(self) -> None:
        """The model is an ordinary one that has not been trained."""
        self.assert_back()
        assert keras.optimizers.SGD.apply is APPLY
        now = weights_of(self.model)
        for name, value in self.weights.items():
            np.testing.assert_array_equal(now[name], value, name)
