"""Variables in a checkpoint of TensorFlow, in parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import checkpoint


def built():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def write(model, prefix, rank=0):
    parts = [
        part
        for name, variable in checkpoint.named_variables(model).items()
        for part in checkpoint.parts_here(name, variable, rank)
    ]
    checkpoint.write(str(prefix), parts)
    return parts


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_shards_are_written_one_by_one_and_read_whole(
    towers, small_shards, tmp_path
):
    x, y = np.ones((6, 6), "float32"), np.ones((6, 8), "float32")
    with kt.TowerStrategy(towers, weights="sharded"):
        model = built()
        model.fit(x, y, verbose=0)
        parts = write(model, tmp_path / "one")
        # Of variables that all ranks have, the others write nothing.
        for name, variable in checkpoint.named_variables(model).items():
            assert checkpoint.parts_here(name, variable, 1) == []
        kernel, _ = model.weights
        wanted = [
            v.numpy() for v in (*model.weights, *model.optimizer.variables)
        ]
        own = [part for part in parts if part.name.startswith("weights/000/")]
        assert len(own) == towers
        # Read back shard by shard.
        kernel.assign(np.zeros(kernel.shape))
        checkpoint.read_into(str(tmp_path / "one"), own[0].name, kernel)
        assert (kernel.numpy() == wanted[0]).all()
    reader = tf.train.load_checkpoint(str(tmp_path / "one"))
    names = [n for n in checkpoint.named_variables(model) if "seeds" not in n]
    for name, value in zip(names, wanted, strict=True):
        assert (reader.get_tensor(name) == value).all()


def test_other_cuts_of_several_writers_are_read(tmp_path):
    """Ranks that have cut a variable in two are read by three."""
    whole = np.arange(30, dtype="float32").reshape(6, 5)
    prefixes = []
    for rank, (first, count) in enumerate([(0, 4), (4, 2)]):
        prefixes.append(str(tmp_path / f"part-{rank}"))
        rows = tf.constant(whole[first : first + count])
        where = f"6 5 {first},{count}:0,5"
        part = checkpoint.Part("weights/000/kernel", where, lambda r=rows: r)
        checkpoint.write(prefixes[-1], [part])
    merged = str(tmp_path / "merged")
    checkpoint.merge(prefixes, merged)
    read = [
        checkpoint.read(merged, part.name, "float32", f"6 5 {first},2:0,5")
        for first in (0, 2, 4)
    ]
    np.testing.assert_array_equal(np.concatenate(read), whole)
    np.testing.assert_array_equal(
        checkpoint.read(merged, part.name, "float32"), whole
    )
