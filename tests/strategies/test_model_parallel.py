"""Towers of several devices, which divide each layer of a model."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit.update.sharding_policy import ShardingPolicy
from keras_towers.fit.weights.model_state import output_paths
from keras_towers.fit.weights.shards import ShardedVariable
from keras_towers.foundation import notices
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.kit import meshes
from tests.kit.compare import (
    assert_all_close,
    assert_exact,
    assert_same,
    assert_same_history,
    assert_same_model,
    use_model,
)
from tests.kit.meshes import mesh_of
from tests.kit.sampling import sample_of
from tests.kit.training import seeded

pytestmark = pytest.mark.alternate

WIDTH, WORDS, LENGTH, HEADS = 24, 50, 11, 6
RNG = np.random.default_rng(0)
TOKENS, NEXT = RNG.integers(0, WORDS, (2, 22, LENGTH)).astype("int32")
# As Megatron-LM divides a transformer.
LAYOUTS = {
    r".*attention/(query|key|value)/kernel": (None, "model", None),
    r".*attention/(query|key|value)/bias": ("model", None),
    ".*attention/attention_output/kernel": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}


def layout_map(mesh, layouts=LAYOUTS):
    return meshes.layout_map(mesh, layouts)


def transformer():
    keras.utils.set_random_seed(1)
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(words)
    own = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(
        HEADS, WIDTH // HEADS, name="attention"
    )
    x += attention(own, own)
    own = layers.LayerNormalization()(x)
    own = layers.Dense(4 * WIDTH, "gelu", name="up")(own)
    own = layers.Dropout(0.1, seed=3)(own)
    x += layers.Dense(WIDTH, name="down")(own)
    model = keras.Model(words, layers.Dense(WORDS, name="head")(x))
    model.compile(
        keras.optimizers.AdamW(1e-3, global_clipnorm=1.0, use_ema=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def train(model):
    # The last batch is smaller, and one tower has no example of it.
    given = {"batch_size": 7, "shuffle": False, "verbose": 0}
    return model.fit(TOKENS, NEXT, epochs=2, **given).history


def train_and_predict(model):
    return train(model), model.predict(TOKENS, batch_size=7, verbose=0)


@functools.cache
def on_one_device():
    return use_model(transformer, train, in_graph=False)


@pytest.mark.parametrize(
    ("rows", "columns", "options"),
    sample_of([(1, 2, {}), (2, 3, {}), (2, 2, {"micro_batches": 2})], 3),
)
@pytest.mark.core
def test_a_transformer_is_the_same(rows, columns, options):
    layouts = layout_map(mesh_of(rows, columns))
    strategy = kt.ModelParallelStrategy(layouts, **options)
    assert_exact(transformer, train_and_predict, strategy, tolerance=2e-5)
    description = strategy.describe()
    assert f"{columns} devices each" in description
    places = f"a step computes on {rows} towers x {columns} columns"
    assert (places in description) == (rows > 1)
    assert (" over columns, " in description) == (rows > 1)
    assert "computed once" not in description


def test_towers_may_have_copies_as_gpus_have(monkeypatch):
    copied = functools.partialmethod(ShardingPolicy.__init__, mirrors=True)
    monkeypatch.setattr(ShardingPolicy, "__init__", copied)
    strategy = kt.ModelParallelStrategy(layout_map(mesh_of(2, 2)))
    assert_same(use_model(transformer, train, strategy), on_one_device(), 2e-5)


class Logged(keras.Model):
    """Logs what a loop makes of a kernel, which each device computes."""

    def __init__(self):
        super().__init__()
        self.up = layers.Dense(4, name="up")

    def call(self, inputs):
        return self.up(inputs)

    def train_step(self, data):
        def add(k, total):
            return k + 1, total + tf.reduce_sum(self.up.kernel)

        logs = super().train_step(data)
        _, total = tf.while_loop(lambda k, _: k < 3, add, [0, 0.0])
        return {**logs, "total": total}


def rows_of_a_table():
    """Its optimizer adds up a gradient's rows, as many as there happen."""
    words = keras.Input((3,), dtype="int32")
    x = layers.Embedding(20, 4, name="table")(words)
    return keras.Model(words, layers.Dense(4)(layers.Flatten()(x)))


def all_in_columns():
    """Columns update all weights, so that towers exchange no gradient."""
    words = keras.Input((3,), dtype="int32")
    x = layers.Embedding(20, 4, name="table")(words)
    return keras.Model(words, layers.GlobalAveragePooling1D()(x))


def looked_up():
    """Python tells TensorFlow the shape of what a table has."""
    words = keras.Input((3,), dtype="int32")
    numbers = layers.IntegerLookup(vocabulary=[1, 2, 5, 7])(words)
    x = layers.Embedding(20, 4, name="table")(numbers)
    return keras.Model(words, layers.Dense(4)(layers.Flatten()(x)))


_STEPS = [Logged, rows_of_a_table, all_in_columns, looked_up]


@pytest.mark.parametrize("build", sample_of(_STEPS))
def test_what_steps_of_users_do(build):
    x = RNG.integers(0, 20, (14, 4 if build is Logged else 3))

    def act(model):
        y = np.ones((14, 4))
        return model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history

    both = {
        ".*up/kernel": (None, "model"),
        ".*table/embeddings": ("batch", "model"),
    }
    strategy = kt.ModelParallelStrategy(layout_map(mesh_of(2, 2), both))
    make = seeded(
        build, keras.optimizers.Adagrad, keras.losses.MeanSquaredError
    )
    assert_exact(make, act, strategy)
    assert "LookupTableFind" not in strategy.describe()


@pytest.mark.parametrize("kind", sample_of(["ragged", "sparse"]))
def test_rows_of_other_things_than_examples(kind):
    """The first axis of their entries has the size of no batch."""
    if kind == "ragged":
        lengths = RNG.integers(1, 6, 20)
        words = RNG.integers(0, WORDS, lengths.sum())
        x = tf.RaggedTensor.from_row_lengths(words, lengths)
    else:
        x = RNG.random((20, 12), "float32")
        x = tf.sparse.from_dense(np.where(x > 0.7, x, 0))
    y = RNG.normal(size=(20, 2))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)

    class Model(keras.Model):
        def __init__(self):
            super().__init__(name=kind)
            self.first = layers.Embedding(WORDS, 8, name="first")
            self.up = layers.Dense(8, "gelu", name="up")
            self.down = layers.Dense(2, name="down")

        def call(self, inputs):
            if kind == "sparse":
                return self.down(self.up(inputs))
            values = self.up(self.first(inputs.values))
            rows = tf.RaggedTensor.from_row_splits(values, inputs.row_splits)
            return self.down(tf.reduce_mean(rows, 1))

    layouts = {
        ".*first/embeddings": ("model", None),
        ".*up/kernel": (None, "model"),
        ".*up/bias": ("model",),
        ".*down/kernel": ("model", None),
    }
    strategy = kt.ModelParallelStrategy(layout_map(mesh_of(2, 2), layouts))
    make = seeded(Model, keras.optimizers.Adam, keras.losses.MeanSquaredError)
    assert_exact(make, lambda m: m.fit(data, verbose=0), strategy)


def test_a_script_for_other_backends_runs_as_it_is():
    def is_divided(weight):
        return isinstance(weight._value, ShardedVariable)

    wanted = on_one_device()
    mesh = mesh_of(2, 2)
    divided = [
        weight.path
        for weight in wanted.model.weights
        if any(re.fullmatch(key, weight.path) for key in LAYOUTS)
    ]
    assert divided
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=layout_map(mesh), batch_dim_name="batch"
        )
    )
    try:
        model = transformer()
        # A device may be too small for it until it trains.
        assert [w.path for w in model.weights if is_divided(w)] == divided
        found = train(model)
    finally:
        keras.distribution.set_distribution(None)
    assert_same_history(found, wanted.returned, 2e-5)
    assert_same_model(model, wanted.model, 2e-5)


def test_towers_divide_what_columns_divide_too(tmp_path):
    """As the layout maps of KerasHub do; the file is an ordinary one."""
    both = {
        key: tuple(
            name or ("batch" if k == axes.index(None) else None)
            for k, name in enumerate(axes)
        )
        if None in axes
        else axes
        for key, axes in LAYOUTS.items()
    }
    both["words/embeddings"] = ("model", "batch")
    strategy = kt.ModelParallelStrategy(
        layout_map(mesh_of(2, 2), both), gather_bytes=2000
    )
    path = tmp_path / "model.keras"

    def act(model):
        found = train(model)
        model.save(path)
        return found

    trained = use_model(transformer, act, strategy)
    assert_same(trained, on_one_device(), 2e-5)
    (held,) = re.findall(r" weights: (.*)", strategy.describe())
    bytes_ = [
        int(number.replace(",", ""))
        for number in re.findall(r"([\d,]+) bytes", held)
    ]
    sizes = {True: 0, False: 0}
    for weight in trained.model.trainable_variables:
        is_divided = any(re.fullmatch(key, weight.path) for key in both)
        sizes[is_divided] += weight.numpy().nbytes
    # What no key matches is on the first device.
    assert bytes_[0] <= 0.3 * sizes[True] + sizes[False]
    assert len(bytes_) == 4 and max(bytes_[1:]) <= 0.3 * sizes[True]
    again = keras.models.load_model(path)
    assert_all_close(again.weights, trained.model.weights)
    assert_all_close(
        again.optimizer.variables, trained.model.optimizer.variables
    )


def _standardized(x, kernel):
    mean, variance = tf.nn.moments(kernel, [0], keepdims=True)
    return x @ ((kernel - mean) * tf.math.rsqrt(variance + 1e-3))


def _standardized_by_all(x, kernel):
    mean, variance = tf.nn.moments(kernel, [0, 1], keepdims=True)
    return x @ ((kernel - mean) * tf.math.rsqrt(variance + 1e-3))


def _with_checked_ones(x, kernel):
    y = x @ kernel
    ones = tf.ones(tf.shape(y))
    checked = tf.ensure_shape(ones, [None, 4])
    given = tf.compat.v1.placeholder_with_default(ones, [None, 4])
    return tf.ensure_shape(y + tf.tanh(checked) * given, [None, 4])


class _OfKernel(layers.Layer):
    """A function of the inputs and a kernel."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, inputs):
        return self.function(inputs, tf.convert_to_tensor(self.kernel))


@pytest.mark.parametrize(
    "axes", [("model", None), (None, "model"), ("batch", "model")]
)
@pytest.mark.parametrize(
    "function", [_standardized, _standardized_by_all, _with_checked_ones]
)
@pytest.mark.filterwarnings("error:keras_towers failed")
def test_what_is_made_of_a_weight_or_its_sizes_is_divided(function, axes):
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([_OfKernel(function, name="own")])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    def act(model):
        x = np.random.default_rng(1).random((22, 8), "float32")
        given = {"batch_size": 7, "shuffle": False, "verbose": 0}
        return model.fit(x, x[:, :4], **given).history

    strategy = kt.ModelParallelStrategy(
        layout_map(mesh_of(2, 2), {"own/kernel": axes})
    )
    assert_exact(make, act, strategy, tolerance=2e-5)
    assert "computed once" not in strategy.describe()


def test_the_axis_of_the_batch_may_be_the_second():
    mesh = mesh_of(2, 3, ("model", "batch"))
    strategy = kt.ModelParallelStrategy(layout_map(mesh), "batch")
    assert strategy.num_towers == 3
    assert_same(use_model(transformer, train, strategy), on_one_device(), 2e-5)


def test_a_mesh_of_one_axis_divides_batches_and_weights():
    mesh = keras.distribution.DeviceMesh((2,), ["data"], ["cpu:0", "cpu:1"])
    layouts = layout_map(mesh, {".*kernel": ("data",)})
    strategy = kt.ModelParallelStrategy(layouts)
    assert_same(use_model(transformer, train, strategy), on_one_device(), 2e-5)
    assert "weights: " in strategy.describe()


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            (None, "model"),
            "axis 1 has 50 entries, which 3 devices cannot share",
        ),
        (("model", "model"), "more than one axis"),
        ((None, None, "model"), "has 3 axes, but the weight has 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(axes, said):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(50, name="head")])
    model.compile("sgd", "mse")
    x, y = np.ones((6, 4)), np.ones((6, 50))
    layouts = layout_map(mesh_of(1, 3), {".*head/kernel": axes})
    strategy = kt.ModelParallelStrategy(layouts)
    with pytest.raises(kt.TowerError, match=said), strategy:
        model.fit(x, y, verbose=0)
    assert_ordinary(model)
    model.fit(x, y, verbose=0)


def test_meshes_that_are_refused():
    devices = [f"cpu:{index}" for index in range(8)]
    cube = keras.distribution.DeviceMesh((2, 2, 2), ("a", "b", "c"), devices)
    missing = mesh_of(1, 2, devices=["cpu:0", "gpu:7"])
    twice = mesh_of(1, 2, devices=["cpu:0", "cpu:0"])
    for mesh, said in (
        (cube, "one or two axes"),
        (missing, "gpu:7"),
        (twice, "more than once"),
    ):
        with pytest.raises(kt.TowerError, match=said):
            kt.ModelParallelStrategy(layout_map(mesh, {}))
    with pytest.raises(kt.TowerError, match=r"LayoutMap"):
        kt.ModelParallelStrategy(mesh_of(1, 2))
    with pytest.raises(kt.TowerError, match="has no option"):
        kt.ModelParallelStrategy(layout_map(mesh_of(1, 2)), weights="sharded")
    layouts = layout_map(mesh_of(1, 2), {"*up/kernel": (None, "model")})
    said = r"key '\*up/kernel' .* is not a regular expression \(nothing to"
    with pytest.raises(kt.TowerError, match=said):
        kt.ModelParallelStrategy(layouts)


class _Block(keras.layers.Layer):
    """A layer with layers, one of which has no weights."""

    def __init__(self):
        super().__init__()
        self.dense, self.drop = layers.Dense(4), layers.Dropout(0.1)

    def call(self, x):
        return self.drop(self.dense(x))


def _nested():
    given = keras.Input((4,))
    inner = keras.Sequential([layers.ReLU(), layers.Dense(4)])
    return keras.Model(given, layers.Dense(50)(inner(_Block()(given))))


def _lazy():
    return keras.Sequential([_Block(), layers.ReLU(), layers.Dense(50)])


@pytest.mark.parametrize("make", [_nested, _lazy])
def test_outputs_have_the_paths_by_which_keras_looks_them_up(make, monkeypatch):
    asked = set()
    distribution = keras.distribution.ModelParallel(
        layout_map=layout_map(mesh_of(1, 2), {})
    )
    model = make()
    model.compile("sgd", "mse")
    monkeypatch.setattr(distribution, "get_tensor_layout", asked.add)
    with distribution.scope():
        model.fit(np.ones((6, 4)), np.ones((6, 50)), verbose=0)
    assert {*output_paths(model)} == asked
    assert len(asked) > 5


def test_keys_that_match_no_weight_are_named(caplog, monkeypatch):
    """Those for outputs of layers are hints, others are mistakes."""
    monkeypatch.setattr(notices, "_said", {})
    layouts = layout_map(
        mesh_of(1, 2),
        {
            ".*dense.*kernel": (None, "model"),
            "bias": ("model",),
            "renamed/kernel": ("model",),
            ".*/drop.*/output": ("batch", None),
            ".*renamed.*output": ("batch", None),
        },
    )
    model = _lazy()
    model.compile("sgd", "mse")
    with caplog.at_level("INFO"), kt.ModelParallelStrategy(layouts):
        model.fit(np.ones((6, 4)), np.ones((6, 50)), verbose=0)
    said = {
        r.levelname: r.message for r in caplog.records if "key" in r.message
    }
    assert "outputs of layers: '.*/drop.*/output'." in said["INFO"]
    # Keras compares a key with a whole path.
    _, _, unmatched = said["WARNING"].partition("of no layer's output: ")
    advice = r"'bias' \(write '\.\*bias' for '[\w/]+/bias'\), "
    others = "'renamed/kernel', '.*renamed.*output'."
    assert re.match(advice + re.escape(others), unmatched), unmatched
