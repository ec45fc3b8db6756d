"""XLA compiles what every tower computes, with the results of one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.graph.graph_function import GraphFunction
from keras_towers.fit.step.graph.tower_program import TowerProgram
from keras_towers.inspection.conformance import case_models as m
from tests.fit.step.acts import Acts, ReadsItsUpdate, Stepping, Twice
from tests.kit.compare import assert_exact, assert_same, use_model
from tests.kit.sampling import sample_of
from tests.kit.training import (
    X,
    Y,
    adam,
    classifier,
    compiled,
    fit,
    seeded,
    stacked,
)

pytestmark = pytest.mark.alternate

# Two batches of 16 rows.
FEW = 32
# XLA rounds fused operations differently.
ROUNDING = 5e-6
# And it rounds to 16 bits only what leaves a computation.
ROUNDING_16 = 5e-3


def drop():
    """XLA draws other numbers than TensorFlow: they show that it runs."""
    return keras.layers.Dropout(0.4, seed=3)


@pytest.fixture
def reasons(logged):
    """Log messages about steps that XLA does not compile, and their levels."""
    return lambda: logged("jit_compile")


def trained(model):
    rows = (m.TOKENS if model.input_shape == (None, 4) else X)[:FEW]
    return fit(model, x=rows, y=m.LABELS[:FEW])


def own_step_with_embedding(cls=Stepping):
    inner = m.with_embedding()
    return cls(*inner.inputs, *map(drop(), inner.outputs))


Dense = keras.layers.Dense


def dropping():
    return m.mlp(drop())


class Counts(keras.layers.Layer):
    """Reads and checks what it has written, also as XLA cannot write it."""

    def build(self, shape):
        self.total = self.add_weight(shape=(), trainable=False)
        self.seen = self.add_weight(shape=(3,), trainable=False)

    def call(self, x):
        self.total.assign_add(tf.reduce_mean(x))
        half = self.total * 0.5
        self.total.assign(half)
        self.seen.value.scatter_nd_add([[1]], [half])
        tf.debugging.assert_less(half, 1e9)
        return x + self.total + tf.reduce_sum(self.seen.value)


def counting():
    keras.utils.set_random_seed(2)
    return m.mlp(keras.layers.BatchNormalization(), Counts(), drop())


class Sharpness(keras.Model):
    """Takes gradients at weights moved uphill, and moves them back."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables

        def gradients():
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            return loss, tape.gradient(loss, weights)

        _, uphill = gradients()
        scale = 0.05 / tf.linalg.global_norm(uphill)
        for weight, gradient in zip(weights, uphill, strict=True):
            weight.assign_add(scale * gradient)
        loss, found = gradients()
        for weight, gradient in zip(weights, uphill, strict=True):
            weight.assign_sub(scale * gradient)
        self.optimizer.apply(found, weights)
        return {"loss": loss}


def moving_uphill():
    inner = counting()
    return Sharpness(inner.inputs, inner.outputs)


@pytest.mark.parametrize(
    ("build", "optimizer", "options"),
    [
        (functools.partial(own_step_with_embedding, Twice), adam, {}),
        (moving_uphill, m.momentum, {"updates": "each"}),
    ],
)
def test_updates_that_follow_other_writes(build, optimizer, options, reasons):
    make = compiled(build, optimizer, metrics=lambda: None, jit_compile=True)
    strategy = kt.TowerStrategy(2, **options)
    assert_exact(make, trained, strategy, tolerance=ROUNDING, in_graph=True)
    assert reasons() == []


def test_xla_reads_and_writes_the_copies_of_towers(monkeypatch):
    on_second: list[str] = []
    add_to_graph = TowerProgram.add_to_graph

    def added(*args, **kwargs):
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        results = add_to_graph(*args, **kwargs)
        made = graph.get_operations()[before:]
        on_second.extend(o.type for o in made if o.device.endswith(":1"))
        return results

    monkeypatch.setattr(TowerProgram, "add_to_graph", added)
    model = compiled(dropping, jit_compile=True)()
    with kt.TowerStrategy(2, updates="each"):
        trained(model)
    assert "StatefulPartitionedCall" in on_second
    assert not {"ReadVariableOp", "AssignVariableOp"} & set(on_second)


def test_sizes_that_the_trace_does_not_know_are_those_of_each_batch():
    """A kernel of 9 does not fit into all texts."""

    def layers():
        pooling = keras.layers.GlobalAveragePooling1D()
        return [keras.layers.Conv1D(4, 9), pooling, Dense(3)]

    def act(model):
        rows = np.random.default_rng(0).normal(size=(8, 20, 3))
        pairs = tf.data.Dataset.from_tensor_slices((rows, Y[:8]))
        padded = pairs.padded_batch(8, ((None, 3), ()))
        return model.fit(padded, verbose=0).history

    make = stacked(layers, (None, 3), jit_compile=True)
    strategy = kt.TowerStrategy(2, updates="each")
    assert_exact(make, act, strategy, tolerance=ROUNDING)


def loop_over_examples(x):
    scaled = tf.map_fn(lambda row: row * tf.reduce_sum(row), x)
    mapped = keras.ops.map(lambda row: keras.ops.sort(row), scaled)
    return tf.vectorized_map(lambda row: row - tf.reduce_max(row), mapped)


def loop_in_loops(x):
    """The lists of inner loops are elements of lists of outer ones."""
    squares = tf.map_fn(lambda row: tf.map_fn(tf.square, row), x)
    return tf.scan(lambda total, row: total * 0.5 + row, squares)


@pytest.mark.parametrize("loops", (loop_over_examples, loop_in_loops))
def test_fewer_examples_than_towers_in_loops_over_them(loops):
    """XLA compiles rounds that a tower without examples never runs."""

    def act(model):
        x, y = X[:1], m.LABELS[:1]
        returned = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
        return returned, fit(model, x=x, y=y, epochs=2)

    def layers():
        return [Dense(3), Acts(loops), drop(), Dense(3)]

    make = stacked(layers, jit_compile=True)
    strategy = kt.TowerStrategy(3)
    assert_exact(make, act, strategy, tolerance=ROUNDING, in_graph=True)


def test_xla_draws_other_numbers():
    one, other = (
        tf.function(drop(), jit_compile=xla)(tf.ones([50]), training=True)
        for xla in (True, False)
    )
    assert np.abs(one - other).max() > 1


def _strings(x):
    number = tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x)))
    return x + 0 * tf.reshape(number, tf.shape(x))


def test_only_what_xla_lacks_runs_without_it(reasons):
    """One device does not compile the step; what it drops is what XLA drops."""

    def make(act):
        return compiled(lambda: m.mlp(drop(), Acts(act)), jit_compile=True)

    found = use_model(make(_strings), trained, kt.TowerStrategy(2))
    assert reasons() == []
    assert_same(found, use_model(make(tf.identity), trained), ROUNDING)


class Named(keras.Model):
    """Predicts for examples that have names, and returns them beside."""

    def __init__(self):
        super().__init__()
        self.out = Dense(3)

    def call(self, x):
        return self.out(x["numbers"])

    def predict_step(self, x):
        return x["names"], self(x)


def test_strings_beside_the_numbers(reasons):
    def act(model):
        x = {"numbers": X[:7], "names": tf.strings.as_string(tf.range(7))}
        data = tf.data.Dataset.from_tensor_slices((x, Y[:7])).batch(4)
        logs = model.fit(data, verbose=0).history
        names, outputs = model.predict(data.map(lambda x, _: x), verbose=0)
        return logs, names.astype("int32"), outputs

    with_xla, without = (
        seeded(Named, jit_compile=xla) for xla in (True, False)
    )
    found = use_model(with_xla, act, kt.TowerStrategy(3))
    assert reasons() == []
    assert_same(found, use_model(without, act), ROUNDING)


def test_sparse_rows_whose_number_no_function_returns(reasons):
    """XLA returns wrong sizes of what a function returns twice."""
    rows = tf.sparse.from_dense(np.where(X[:FEW] > 0.5, X[:FEW], 0.0))
    data = tf.data.Dataset.from_tensor_slices((rows, m.LABELS[:FEW])).batch(13)

    def build():
        entry = keras.Input(X.shape[1:], sparse=True)
        return keras.Model(entry, Dense(3)(entry))

    def act(model):
        return model.fit(data, verbose=0).history

    make = functools.partial(seeded, build)
    found = use_model(make(jit_compile=True), act, kt.TowerStrategy(3))
    assert_same(found, use_model(make(jit_compile=False), act), ROUNDING)
    ((_, said),) = reasons()
    assert "a size that depends on values" in said


class DrawsAll(keras.layers.Layer):
    """Draws numbers of each kind and dtype, in a loop and in a branch, too.

    Args:
        through: what the numbers go through.
    """

    def __init__(self, through):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(7)
        self.through = through

    def call(self, x):
        rows = tf.shape(x)[0]

        def few(seed):
            return keras.random.truncated_normal((rows,), seed=seed)

        _, total = tf.while_loop(
            lambda k, _: k < 2,
            lambda k, t: (k + 1, self.through(t) + few(5)),
            (0, few(self.seeds)),
        )
        total += tf.cond(
            tf.reduce_sum(x) > 0.0,
            lambda: self.through(few(6)),
            lambda: self.through(few(7)),
        )
        for made in _of_all_kinds(x, rows, self.seeds):
            total += tf.reduce_sum(tf.cast(made, x.dtype), 1)
        return x + self.through(total)[:, None]


def _of_all_kinds(x, rows, seed):
    """Yield numbers of each kind and dtype that XLA has a kernel for."""
    random = keras.random
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        yield random.normal((rows, 3), seed=seed, dtype=dtype)
        yield random.uniform((rows, 3), seed=seed, dtype=dtype)
        yield random.truncated_normal((rows, 3), seed=seed, dtype=dtype)
        # Of no example.
        yield random.normal((1, 3), seed=seed, dtype=dtype)
    for dtype in ("int32", "int64", "uint32", "uint64"):
        yield random.randint((rows, 3), 0, 9, seed=seed, dtype=dtype)
    for dtype in ("int32", "int64"):
        yield random.categorical(x, 4, seed=seed, dtype=dtype)
    yield random.dropout(x, 0.3, seed=seed)
    yield random.shuffle(x, seed=seed)


@pytest.mark.parametrize(
    "strategy",
    sample_of(
        [{"updates": "each"}, {"weights": "sharded", "micro_batches": 2}]
    ),
)
@pytest.mark.parametrize("through", [tf.identity, _strings])
def test_all_draws_are_those_of_one_device_also_without_xla(
    strategy, through, reasons
):
    def make(through):
        return compiled(lambda: m.mlp(DrawsAll(through)), jit_compile=True)

    def act(model):
        return model.predict(X[:7], verbose=0)

    found = use_model(make(through), act, kt.TowerStrategy(3, **strategy))
    assert_same(found, use_model(make(tf.identity), act), ROUNDING_16)
    assert reasons() == []


def test_numbers_of_a_generator_of_tensorflow_are_told(reasons):
    def make():
        noise = Acts(lambda x: x + tf.random.normal(tf.shape(x)))
        return compiled(lambda: m.mlp(noise), jit_compile=True)()

    model = make()
    with kt.TowerStrategy(2):
        trained(model)
        model.fit(X[:FEW], m.LABELS[:FEW], verbose=0)
    ((level, said),) = reasons()
    assert level == "WARNING"
    assert "draws from TensorFlow's own generator" in said
    assert "test_own_batch_step.py:" in said


def test_replicas_compile_their_own_steps(reasons):
    """One of them trains as one device, and drops what XLA drops."""
    make = compiled(dropping, jit_compile=True)
    strategy = kt.SyncReplicasStrategy(towers=1, replicas_to_aggregate=1)
    found = use_model(make, trained, strategy)
    assert reasons() == []
    assert_same(found, use_model(make, trained), ROUNDING)


def test_asynchronous_towers_compile_their_own_steps(monkeypatch):
    modes = []
    init = GraphFunction.__init__

    def made(function, graph, mode="called"):
        modes.append(mode)
        init(function, graph, mode)

    monkeypatch.setattr(GraphFunction, "__init__", made)
    # Its step updates no metric: on one device, ``fit`` raises if it has one.
    make = compiled(
        own_step_with_embedding, metrics=lambda: None, jit_compile=True
    )
    model = make()
    with kt.AsyncTowerStrategy(2):
        trained(model)
    assert modes.count("xla") >= 2


def test_asynchronous_towers_read_what_they_have_updated(reasons):
    """Gradients leave a compiled step at its end, so it is not compiled."""
    make = stacked(
        lambda: [Dense(3)],
        cls=ReadsItsUpdate,
        optimizer=lambda: keras.optimizers.SGD(0.5),
        jit_compile=True,
    )

    def act(model):
        """One step, since towers take others at the same time."""
        return fit(model, 1, X[:16], m.LABELS[:16])

    strategy = kt.AsyncTowerStrategy(2, scale_gradient=False)
    found = use_model(make, act, strategy)
    assert_same(found, use_model(make, act), ROUNDING)
    ((_, said),) = reasons()
    assert "kernel after an update of it" in said


def test_auto_is_what_it_is_without_a_strategy(reasons, monkeypatch):
    """On a machine with GPUs Keras turns it on; nobody has asked for it."""
    devices = [tf.config.PhysicalDevice("GPU:0", "GPU")]
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: devices
    )
    with kt.TowerStrategy(2):
        model = classifier(Acts(lambda x: x + tf.random.normal(tf.shape(x))))
        assert model.jit_compile is True
        trained(model)
    ((level, said),) = reasons()
    assert level == "INFO"
    assert "test_own_batch_step.py" in said
    monkeypatch.undo()
    with kt.TowerStrategy(2):
        assert classifier().jit_compile is False
