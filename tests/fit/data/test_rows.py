"""Parts of a batch with different numbers of rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.data import batches
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.case_models import ByHand
from tests.fit.step.acts import sparse
from tests.kit.compare import (
    assert_all_close,
    assert_close,
    assert_exact,
    use_model,
)
from tests.kit.sampling import sample_of
from tests.kit.training import X, Y, strategy_of

pytestmark = pytest.mark.alternate


def semi_supervised(model, labelled, unlabelled):
    """Count steps, in a variable that no batch is needed for."""
    x, y = labelled
    model.steps.assign_add(1.0)
    loss = sparse(y, model.net(x, training=True))
    return loss + 0.1 * tf.reduce_mean(model.net(unlabelled) ** 2)


def make(step=semi_supervised, **options):
    steps = keras.Variable(0.0, trainable=False, name="steps")
    model = ByHand(step, net=m.mlp(), steps=steps)
    model.compile(keras.optimizers.SGD(0.005), **options)
    return model


def with_a_table(static):
    """Batches of labelled examples, each with the same table."""
    data = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48]))
    data = data.batch(16, drop_remainder=static)
    return data.map(lambda x, y: ((x, y), tf.ones((5, 6))))


def of_sizes(few, many, static):
    """Batches of two parts."""
    labelled = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24]))
    rest = tf.data.Dataset.from_tensor_slices(X[:48])
    return tf.data.Dataset.zip(
        labelled.batch(few, drop_remainder=static),
        rest.batch(many, drop_remainder=static),
    )


def generated(*sizes):
    """Batches of five labelled examples, and of so many unlabelled ones."""

    def draw():
        for rows in sizes:
            yield (X[:5], Y[:5]), X[:rows]

    x, y = tf.TensorSpec([None, 6]), tf.TensorSpec([None], Y.dtype)
    return tf.data.Dataset.from_generator(draw, output_signature=((x, y), x))


class SemiSupervised(keras.utils.PyDataset):
    """Batches of four labelled examples, and of six others."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (X[:4], Y[:4]), X[: 6 + index]


# The table has as many rows as a tower gets of a batch.
TABLES = [with_a_table(static) for static in (True, False)]


@pytest.mark.parametrize(
    "data, steps, parts, ahead",
    sample_of(
        [
            *((table, 1, 1, False) for table in TABLES),
            (TABLES[1], 1, 2, False),
            *((of_sizes(7, 14, s), 1, 1, False) for s in (True, False)),
            # The first batch has as many of both, the next one has not.
            *((generated(5, 9, 5, 3), steps, 1, False) for steps in (1, 2)),
            # As towers that are GPUs get them.
            *((table, 1, 1, True) for table in TABLES),
            (of_sizes(7, 14, static=True), 1, 2, True),
            (SemiSupervised(), 2, 1, True),
        ]
    ),
)
def test_tensors_with_other_numbers_of_rows_go_to_all_towers(
    data, steps, parts, ahead
):
    assert_exact(
        lambda: make(steps_per_execution=steps),
        lambda model: model.fit(data, epochs=2, verbose=0, shuffle=False),
        strategy_of(3, ahead, micro_batches=parts),
        tolerance=5e-6,
        in_graph=True,
    )


def test_a_validation_looks_at_its_own_batches():
    """Those that are trained on have static shapes."""
    data, held_out = of_sizes(7, 14, static=True), generated(9, 3)

    def build():
        model = make()
        model.test_step = lambda data: {"loss": semi_supervised(model, *data)}
        return model

    assert_exact(
        build,
        lambda model: model.fit(data, validation_data=held_out, verbose=0),
        kt.TowerStrategy(3),
        in_graph=True,
    )


T, X8, Y8 = tf.ones((10, 6)), X[:8], Y[:8]


@pytest.mark.parametrize(
    "batch, rows",
    [
        (({"a_table": T, "b": X8}, Y8), 8),
        (({"a_table": T, "another": T, "more": T, "x": X8}, Y8), 8),
        (({"a_table": T, "b": X8, "c": X8},), 8),
        ({"a_table": T, "b": X8, "c": X8}, 8),
        (((X8, Y8), T), 8),
        ((T, None), 10),
    ],
)
def test_the_examples_are_those_of_the_targets_or_of_most_parts(batch, rows):
    seen = batches.Batch.of(batch)
    assert seen.size == seen.static_size == rows
    undivided = {seen.names: seen.undivided()}
    specs = seen.specs(any_size=True).structure
    for known in (batch, specs):
        divided = batches.Batch.of(known, undivided).divided
        leaves = zip(seen.leaves, divided, strict=True)
        assert [d for leaf, d in leaves if leaf is not None] == [
            len(leaf) == rows for leaf in seen.leaves if leaf is not None
        ]
    found = batches.Batch.of(batch, undivided).split(2, 0, 2)
    assert found.total == rows
    assert found.counts(seen) == [rows // 2] * 2


EACH = {"batches": "each"}
REFUSED = {
    "other rows": (of_sizes(7, 14, False), EACH, r"x\[0\] has 7.*y has 14"),
    # Each tower has one, and no rows to which it belongs.
    "a number": (
        with_a_table(static=False).map(lambda x, _: (x, 3.0)),
        EACH,
        "y of a batch has no rows",
    ),
    "later": (generated(5, 5, 5, 5, 3), {}, r"x\[0\] has 5.*y has 3"),
    "ahead": (
        of_sizes(7, 14, False),
        {"prefetch": True},
        r"x\[0\] has 7.*y has 14.*static",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_towers_cannot_divide_are_refused(case):
    data, options, words = REFUSED[case]
    model = make()
    before = [weight.numpy() for weight in model.trainable_weights]
    with (
        pytest.raises(kt.TowerError, match=words),
        strategy_of(2, **options),
    ):
        model.fit(data, verbose=0)
    if case == "other rows":
        assert_all_close(model.trainable_weights, before, 0)
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
    def predicting():
        model = OtherLengths(m.mlp().layers)
        model.compile()
        return model

    wanted, found = (
        use_model(
            predicting,
            lambda model: model.predict(X[:10], batch_size=4, verbose=0),
            strategy,
        ).returned
        for strategy in (None, kt.TowerStrategy(3))
    )
    for name, values in wanted.items():
        if name == "words":
            np.testing.assert_array_equal(found[name], values)
        else:
            assert_close(found[name], values)


class Graphs(tf.experimental.BatchableExtensionType):
    """Batches of a user's own type."""

    nodes: tf.Tensor
    edges: tf.RaggedTensor


def test_batches_of_a_type_of_the_users_own():
    def by_degree(model, graphs, y):
        degrees = tf.reduce_sum(graphs.edges, -1, keepdims=True)
        return sparse(y, model.net(graphs.nodes + tf.cast(degrees, "float32")))

    edges = tf.RaggedTensor.from_row_lengths(tf.range(48) % 3, [2] * 24)
    graphs = Graphs(nodes=tf.constant(X[:24]), edges=edges)
    data = tf.data.Dataset.from_tensor_slices((graphs, Y[:24])).batch(7)
    assert_exact(
        lambda: make(by_degree),
        lambda model: model.fit(data, verbose=0),
        kt.TowerStrategy(3),
    )
