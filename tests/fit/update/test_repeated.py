"""Updates are traced once for all weights of a kind, and are those of Keras."""

import collections
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.update import repeated
from keras_towers.fit.update.one_device import updating

pytestmark = pytest.mark.core

SHAPES = [(4, 3), (3,), (4, 3), (5, 2), (3,), (), (2, 3, 2), (2,)]
ADAM = {"learning_rate": 0.1}
OPTIMIZERS = {
    "adadelta": lambda: keras.optimizers.Adadelta(**ADAM),
    "adafactor": lambda: keras.optimizers.Adafactor(**ADAM),
    "adagrad": lambda: keras.optimizers.Adagrad(**ADAM),
    "adam": lambda: keras.optimizers.Adam(**ADAM),
    "adam-amsgrad": lambda: keras.optimizers.Adam(amsgrad=True, **ADAM),
    "adam-averaged": lambda: keras.optimizers.Adam(
        use_ema=True, ema_overwrite_frequency=2, **ADAM
    ),
    "adam-accumulated": lambda: keras.optimizers.Adam(
        gradient_accumulation_steps=2, **ADAM
    ),
    "adam-scheduled": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "adam-scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(**ADAM), initial_scale=1.0
    ),
    "adamax": lambda: keras.optimizers.Adamax(**ADAM),
    "adamw": lambda: keras.optimizers.AdamW(global_clipnorm=1.0, **ADAM),
    "adamw-partly": lambda: not_for_some(keras.optimizers.AdamW(**ADAM)),
    "ftrl": lambda: keras.optimizers.Ftrl(**ADAM),
    "lamb": lambda: keras.optimizers.Lamb(**ADAM),
    "lion": lambda: keras.optimizers.Lion(**ADAM),
    "muon": lambda: keras.optimizers.Muon(**ADAM),
    "nadam": lambda: keras.optimizers.Nadam(**ADAM),
    "rmsprop": lambda: keras.optimizers.RMSprop(
        momentum=0.9, centered=True, **ADAM
    ),
}


def not_for_some(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["w0", "w4"])
    return optimizer


def weights_of(shapes, dtype="float32"):
    random = np.random.default_rng(2)
    return [
        keras.Variable(random.normal(size=shape), dtype=dtype, name=f"w{i}")
        for i, shape in enumerate(shapes)
    ]


def gradients_for(shapes):
    random = np.random.default_rng(1)
    return [
        [tf.constant(random.normal(size=s), tf.float32) for s in shapes]
        for _ in range(4)
    ]


def trained(optimizer, gradients, here=True, dtype="float32"):
    """Apply gradients to weights.

    Returns:
        The weights and the optimizer's slots, and the trace.
    """
    weights = weights_of([gradient.shape for gradient in gradients[0]], dtype)
    optimizer.build(weights)

    @tf.function
    def apply(*gradients):
        with updating(optimizer) if here else contextlib.nullcontext():
            optimizer.apply(list(gradients), weights)

    for step in gradients:
        apply(*step)
    graph = apply.get_concrete_function(*gradients[0]).graph
    return [v.numpy() for v in (*weights, *optimizer.variables)], graph


def same(ours, reference):
    for mine, theirs in zip(ours, reference, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_result_is_that_of_keras(name, monkeypatch):
    made = OPTIMIZERS[name]
    calls = collections.Counter()
    record = repeated.Recording.repeat

    def counted(self, inputs):
        calls["repeated"] += 1
        record(self, inputs)

    monkeypatch.setattr(repeated.Recording, "repeat", counted)
    ours, _ = trained(made(), gradients_for(SHAPES))
    again = calls["repeated"]
    reference, _ = trained(made(), gradients_for(SHAPES), here=False)
    assert again >= 2 and calls["repeated"] == again
    same(ours, reference)


def test_writes_and_reads_are_those_of_keras():
    """What is shared is what no weight changes."""
    adam = OPTIMIZERS["adam"]
    _, ours = trained(adam(), gradients_for(SHAPES))
    _, reference = trained(adam(), gradients_for(SHAPES), here=False)

    def number(graph, kinds):
        return sum(op.type in kinds for op in graph.get_operations())

    writes = {"AssignAddVariableOp", "AssignSubVariableOp"}
    assert number(ours, writes) == number(reference, writes)
    assert number(ours, {"Sqrt"}) == len(SHAPES) + 1
    assert number(reference, {"Sqrt"}) == 2 * len(SHAPES)


def test_rows_and_missing_gradients_lie_between():
    rows = tf.IndexedSlices(
        tf.ones((2, 3)), tf.constant([0, 2]), tf.constant([4, 3])
    )
    step = gradients_for([(4, 3), (4, 3), (4, 3)])[0]

    def trained_with(here):
        weights = weights_of([(4, 3)] * 4)
        adam = keras.optimizers.Adam(0.1)
        adam.build(weights)

        @tf.function
        def apply():
            with updating(adam) if here else contextlib.nullcontext():
                adam.apply([step[0], rows, None, step[1]], weights)

        apply()
        apply()
        return [v.numpy() for v in (*weights, *adam.variables)]

    same(trained_with(True), trained_with(False))


def test_weights_of_other_types_are_of_another_kind():
    adam = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
    gradients = gradients_for([(2,), (2,), (3,), (3,)])
    for dtype in ("float64", "bfloat16"):
        ours, _ = trained(adam(), gradients, dtype=dtype)
        reference, _ = trained(adam(), gradients, here=False, dtype=dtype)
        for mine, theirs in zip(ours, reference, strict=True):
            np.testing.assert_allclose(
                np.asarray(mine, "float64"), np.asarray(theirs, "float64")
            )


def test_gradients_of_unknown_shape():
    @tf.function
    def shapeless(gradient):
        made = tf.numpy_function(lambda g: g, [gradient], tf.float32)
        assert made.shape.rank is None
        with updating(adam):
            adam.apply([made, made], weights)

    def trained_with(step):
        weights[:] = weights_of([(2,), (2,)])
        adam.build(weights)
        step(tf.constant([1.0, -2.0]))
        return [v.numpy() for v in (*weights, *adam.variables)]

    weights: list = []
    adam = keras.optimizers.Adam(0.1)
    ours = trained_with(shapeless)
    adam = keras.optimizers.Adam(0.1)
    same(ours, trained_with(lambda g: adam.apply([g, g], weights)))


def test_own_rules_are_called_for_every_weight():
    class ByName(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            if "w1" not in variable.name:
                super().update_step(gradient, variable, learning_rate)

    gradients = gradients_for([(2,), (2,), (2,)])
    ours, _ = trained(ByName(0.1), gradients)
    same(ours, trained(ByName(0.1), gradients, here=False)[0])

    def own_of_instance():
        adam = keras.optimizers.Adam(0.1)
        usual = adam.update_step
        adam.update_step = lambda g, v, lr: "w1" in v.name or usual(g, v, lr)
        return adam

    ours, _ = trained(own_of_instance(), gradients)
    same(ours, trained(own_of_instance(), gradients, here=False)[0])
    np.testing.assert_array_equal(ours[1], weights_of([(2,)] * 3)[1])


def test_what_draws_or_reads_other_weights_is_not_repeated():
    """Even if an optimizer of Keras did so one day."""
    gradients = gradients_for([(2,), (2,), (2,)])
    other = tf.Variable([1.0, 2.0])

    class Odd(keras.optimizers.Adam):
        def assign_sub(self, variable, value):
            noise = tf.random.uniform([]) * 0 + other
            super().assign_sub(variable, value * noise)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(repeated, "applies_to", lambda optimizer: True)
        ours, graph = trained(Odd(0.1), gradients)
    draws = [op for op in graph.get_operations() if "RandomUniform" in op.type]
    assert len(draws) == 3
    same(ours, trained(Odd(0.1), gradients, here=False)[0])
