"""What is started in many ways: a rank trains, and leaves what came of it.

argv: the folder for a file of each rank, and the strategy. Ranks may share one
output, on which their lines would be mixed.
"""

import contextlib
import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np


def train(together=contextlib.nullcontext):
    """The weights; the last batch is uneven, so that shares differ."""
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    with together():
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [float(weight) for weight in model.get_weights()[0][:, 0]]


def assert_as_one_process(folder, ranks=2):
    """All ranks have left the weights that one process gets."""
    wanted = train()
    files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    found = [json.loads(file.read_text()) for file in files]
    for size, weights in found:
        assert size == ranks
        np.testing.assert_allclose(weights, wanted, atol=1e-6)
        assert weights == found[0][1]


if __name__ == "__main__":
    import keras_towers as kt

    FOLDER, KIND = sys.argv[1:]
    strategy = getattr(kt, KIND)()
    weights = train(lambda: strategy)
    if KIND == "HorovodStrategy":
        from keras_towers import horovod as hvd

        hvd.init()
        assert hvd.size() == strategy.size and hvd.rank() == strategy.rank
    result = pathlib.Path(FOLDER) / f"rank-{strategy.rank}.json"
    result.write_text(json.dumps([strategy.size, weights]))
