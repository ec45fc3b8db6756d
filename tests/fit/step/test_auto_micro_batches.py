"""With micro_batches="auto", steps take smaller parts where memory ends."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.partition.ir.registry import (
    OPERATIONS,
    OperationFacts,
    elementwise,
)
from tests.kit.compare import assert_all_close, assert_exact
from tests.kit.sampling import sample_of
from tests.kit.training import adam, fit, stacked

pytestmark = pytest.mark.alternate

COUNT, BATCH = 44, 20
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]


class Memory:
    """Is enough for some rows at a time.

    Attributes:
        rows: that number.
        failures: how many steps found it too small.
    """

    def __init__(self, rows):
        self.rows = rows
        self.failures = 0

    def zeros(self, x):
        # TensorFlow makes a ResourceExhaustedError of it.
        if len(x) > self.rows:
            self.failures += 1
            raise MemoryError(f"no memory for {len(x)} rows")
        return np.zeros_like(x)


@keras.saving.register_keras_serializable("tests")
class Allocating(keras.layers.Layer):
    """Returns its input, and needs memory for each row of it."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.steps = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        self.steps.assign_add(1.0)
        zeros = tf.numpy_function(self.memory.zeros, [x], x.dtype, False)
        return x + tf.ensure_shape(tf.stop_gradient(zeros), x.shape)


ON_OWN_ROWS = {"PyFuncStateless": OperationFacts(labels=elementwise())}
"""With this row towers call the layer's function on their own rows."""


@pytest.fixture(autouse=True)
def memory_of_each_tower(monkeypatch):
    for type_, facts in ON_OWN_ROWS.items():
        monkeypatch.setitem(OPERATIONS, type_, facts)


def make_in(memory, **options):
    def layers():
        return [
            keras.layers.Dense(7, "tanh"),
            keras.layers.Dropout(0.4, seed=2),
            Allocating(memory),
            keras.layers.Dense(3),
        ]

    clipped = functools.partial(adam, global_clipnorm=0.1)
    return stacked(layers, optimizer=clipped, **options)


def on_batches(model):
    """Train on batches one by one, the last of which is the largest."""
    sizes = (8, 8, 8, 8, 20)
    return [model.train_on_batch(X[:n], Y[:n]) for n in sizes]


def evaluated(model):
    fit(model, 1, X[:4], Y[:4], 4)
    return model.evaluate(X, Y, batch_size=BATCH, verbose=0)


def predicted(model):
    return model.predict(X, batch_size=BATCH, verbose=0)


def fitted(model):
    return fit(model, 2, X, Y, BATCH, validation_data=(X, Y))


@pytest.mark.parametrize(
    ("act", "towers", "steps"),
    sample_of(
        [
            (fitted, 1, 1),
            (fitted, 2, 2),
            (on_batches, 2, 1),
            (evaluated, 2, 1),
            (predicted, 2, 1),
        ],
        3,
    ),
)
def test_the_result_is_that_of_one_device(act, towers, steps, logged):
    memory = Memory(COUNT)
    make = make_in(memory, steps_per_execution=steps)

    def limited(model):
        inside = tf.distribute.has_strategy()
        memory.rows = 4 if inside else COUNT
        return act(model)

    strategy = kt.TowerStrategy(towers, micro_batches="auto")
    assert_exact(make, limited, strategy)
    assert memory.failures
    said = [text for _, text in logged(": memory has run out")]
    assert any("processes a tower's rows in 2 parts" in s for s in said), said
    # Before a tower's rows are divided, a step that trains computes again.
    assert act in (evaluated, predicted) or "parts" not in said[0], said


@pytest.fixture
def short_once(logged):
    """Trains where memory is enough once a plan needs less of it."""

    class Scarce(Memory):
        def zeros(self, x):
            enough = logged(": memory has run out")
            self.rows = COUNT if enough or not self.is_short else 0
            return super().zeros(x)

    def short(model):
        memory.is_short = tf.distribute.has_strategy()
        return fitted(model)

    memory = Scarce(COUNT)
    return memory, short


@pytest.mark.parametrize("updates", [None, "once"])
def test_slots_go_into_shards_after_a_step_ran_out(
    updates, short_once, small_shards, logged
):
    memory, short = short_once
    strategy = kt.TowerStrategy(
        2, micro_batches="auto", remat=False, updates=updates, weights=None
    )
    assert_exact(make_in(memory), short, strategy)
    [(_, said)] = logged(": memory has run out")
    assert memory.failures
    in_shards = "has its optimizer's variables in shards" in said
    assert in_shards == (updates is None), said


@pytest.mark.parametrize("remat", [None, False])
def test_computing_again_comes_before_more_parts(remat, short_once, logged):
    memory, short = short_once
    strategy = kt.TowerStrategy(2, micro_batches="auto", remat=remat)
    assert_exact(make_in(memory), short, strategy)
    [(level, said)] = logged(": memory has run out")
    assert level == "INFO"
    assert memory.failures
    assert (" operations again (" in said) == (remat is None), said
    assert ("a tower's rows in 2 parts" in said) == (remat is False), said


def test_slots_are_restored_before_a_retry():
    """The first steps succeed, and a larger one fails after them."""
    memory = Memory(COUNT)
    rows = iter((COUNT, 3) * 9)

    class Less(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if tf.distribute.has_strategy():
                memory.rows = next(rows)

    def act(model):
        memory.rows = COUNT
        return fit(model, 1, X, Y, 22, callbacks=[Less()])

    strategy = kt.TowerStrategy(2, micro_batches="auto", updates="each")
    assert_exact(make_in(memory), act, strategy)
    assert memory.failures


def test_without_memory_for_one_row_tensorflow_has_the_error():
    memory = Memory(0)
    model = make_in(memory)()
    before = model.get_weights()
    with (
        kt.TowerStrategy(2, micro_batches="auto"),
        pytest.raises(tf.errors.ResourceExhaustedError),
    ):
        fit(model, 1, X, Y, 8)
    # 4 rows of each tower: in 1, 2 and 4 parts.
    assert memory.failures >= 3
    assert_all_close(model.get_weights(), before, 0)


def test_eager_steps_ignore_micro_batches():
    memory = Memory(COUNT)
    model, reference = make_in(memory)(), make_in(Memory(COUNT))()
    model.run_eagerly = reference.run_eagerly = True
    with kt.TowerStrategy(2, micro_batches="auto"):
        fit(model, 1, X, Y, 22)
    fit(reference, 1, X, Y, 22)
    assert memory.failures == 0
    assert_all_close(model.get_weights(), reference.get_weights())
