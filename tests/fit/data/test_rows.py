"""Parts of a batch with different numbers of rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step.acts import sparse
from tests.kit.compare import assert_exact, close, outcome
from tests.kit.training import X, Y


class SemiSupervised(keras.Sequential):
    """Trains on labelled and unlabelled examples together."""

    def train_step(self, data):
        (x, y), more = data
        with tf.GradientTape() as tape:
            loss = sparse(y, self(x, training=True))
            loss += 0.1 * tf.reduce_mean(self(more, training=True) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"mine": loss}


def make(cls=SemiSupervised, **options):
    model = cls(m.mlp().layers)
    model.compile(keras.optimizers.SGD(0.005), **options)
    return model


def of_sizes(few, many, static):
    """Batches of two parts."""
    labelled = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24]))
    rest = tf.data.Dataset.from_tensor_slices(X[:48])
    return tf.data.Dataset.zip(
        labelled.batch(few, drop_remainder=static),
        rest.batch(many, drop_remainder=static),
    )


@pytest.mark.parametrize("static", [True, False])
def test_a_table_beside_the_examples(static):
    table = np.ones((5, 6), "float32")
    data = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48]))
    data = data.batch(16, drop_remainder=static)
    data = data.map(lambda x, y: ((x, y), tf.constant(table)))
    assert_exact(
        make,
        lambda model: model.fit(data, verbose=0),
        kt.TowerStrategy(2),
        tolerance=5e-6,
    )


class Counting(SemiSupervised):
    """Counts its steps, in a variable that no batch is needed for."""

    def __init__(self, layers):
        super().__init__(layers)
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="steps"
        )

    def train_step(self, data):
        self.steps.assign_add(1.0)
        return super().train_step(data)


@pytest.mark.parametrize("static", [True, False])
def test_towers_get_as_a_whole_what_has_other_rows(static):
    data = of_sizes(7, 14, static)
    assert_exact(
        lambda: make(Counting),
        lambda model: model.fit(data, epochs=2, verbose=0),
        kt.TowerStrategy(3),
        tolerance=5e-6,
        in_graph=True,
    )


def generated(batches):
    x, y = tf.TensorSpec([None, 6]), tf.TensorSpec([None], Y.dtype)
    return tf.data.Dataset.from_generator(batches, output_signature=((x, y), x))


@pytest.mark.parametrize("steps", [1, 2])
def test_rows_that_differ_in_a_later_step(steps):
    """The first batch has as many of both, the next one has not."""

    def batches():
        for rows in 5, 9, 5, 3:
            yield (X[:5], Y[:5]), X[:rows]

    data = generated(batches)
    assert_exact(
        lambda: make(Counting, steps_per_execution=steps),
        lambda model: model.fit(data, epochs=2, verbose=0),
        kt.TowerStrategy(2),
        tolerance=5e-6,
        in_graph=True,
    )


def test_other_rows_in_batches_of_towers_own_are_refused():
    model = make()
    before = model.get_weights()
    data = of_sizes(7, 14, static=False)
    with (
        pytest.raises(kt.TowerError, match=r"x\[0\] has 7.*y has 14"),
        kt.TowerStrategy(2, batches="each"),
    ):
        model.fit(data, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)
    model.fit(data, verbose=0)


def test_a_number_in_batches_of_towers_own_is_refused():
    """Each tower has one, and no rows to which it belongs."""
    data = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(6)
    data = data.map(lambda x, y: ((x, y), tf.reduce_mean(x)))
    model = make()
    with (
        pytest.raises(kt.TowerError, match="y of a batch has no rows"),
        kt.TowerStrategy(2, batches="each"),
    ):
        model.fit(data, verbose=0)


def test_rows_that_differ_after_the_first_steps_are_refused():
    def batches():
        for rows in 5, 5, 5, 5, 3:
            yield (X[:5], Y[:5]), X[:rows]

    model = make()
    data = generated(batches)
    with (
        pytest.raises(kt.TowerError, match=r"x\[0\] has 5.*y has 3"),
        kt.TowerStrategy(2),
    ):
        model.fit(data, verbose=0)


class OtherLengths(keras.Sequential):
    """Predicts what has not one row for each example."""

    def predict_step(self, data):
        z = self(data)
        return {
            "twice": tf.concat([z, -z], 0),
            "thirds": tf.reshape(z, [-1, 1]),
            "mean": tf.reduce_mean(z, 0, keepdims=True),
            "kept": tf.boolean_mask(data, data[:, 0] > 0),
            "sorted": tf.sort(z[:, 0]),
            "words": tf.strings.as_string(tf.cast(z[:, 0] * 10, "int32")),
        }


def test_predictions_of_parts_with_other_rows():
    wanted, found = (
        outcome(
            lambda: make(OtherLengths),
            lambda model: model.predict(X[:10], batch_size=4, verbose=0),
            strategy,
        ).returned
        for strategy in (None, kt.TowerStrategy(3))
    )
    for name, values in wanted.items():
        if name == "words":
            np.testing.assert_array_equal(found[name], values)
        else:
            close(found[name], values)


class Graphs(tf.experimental.BatchableExtensionType):
    """Batches of a user's own type."""

    nodes: tf.Tensor
    edges: tf.RaggedTensor


def test_batches_of_a_type_of_the_users_own():
    class Degrees(keras.Sequential):
        def train_step(self, data):
            graphs, y = data
            with tf.GradientTape() as tape:
                degrees = tf.reduce_sum(graphs.edges, -1, keepdims=True)
                loss = sparse(
                    y, self(graphs.nodes + tf.cast(degrees, "float32"))
                )
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss}

    edges = tf.RaggedTensor.from_row_lengths(tf.range(48) % 3, [2] * 24)
    graphs = Graphs(nodes=tf.constant(X[:24]), edges=edges)
    data = tf.data.Dataset.from_tensor_slices((graphs, Y[:24])).batch(7)
    assert_exact(
        lambda: make(Degrees),
        lambda model: model.fit(data, verbose=0),
        kt.TowerStrategy(3),
    )
