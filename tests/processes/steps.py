"""Checks of a worker: steps that write state by themselves, on two ranks."""

import contextlib
import functools
import os
import tempfile
import unittest.mock

import keras
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import (
    case_models as m,
    cases as conformance,
)
from keras_towers.inspection.conformance.cases import Case
from keras_towers.partition.ir.registry import OPERATIONS
from keras_towers.partition.timeline import gradient_buckets
from tests.fit.calls import test_building as building
from tests.fit.step import (
    test_auto_micro_batches as auto,
    test_remat_scope as scopes,
    written,
)
from tests.fit.step.acts import Stepping
from tests.kit import untuned
from tests.kit.compare import assert_all_close, assert_finite
from tests.kit.graphs import assert_freed
from tests.kit.ranks import check
from tests.kit.sampling import draw
from tests.kit.training import X, Y, compiled, fit, stacked
from tests.partition.cases import CASES
from tests.processes import small
from tests.processes.exact import assert_one_device
from tests.processes.small import (
    RANK,
    Does,
    Strategy,
    assert_same_model,
    refused,
)


def assert_exact(make, act, **options):
    """What is done on the ranks is what is done by one process."""
    return assert_one_device(Case(make, act, 5e-6), **options)


@check
def state_that_a_step_writes_whatever_runs_in_between():
    def act(model):
        between = Does(on_epoch_begin=lambda it: it.predict(X[:7], verbose=0))
        # The last batch of five is uneven; a batch of one leaves a rank idle.
        history = model.fit(X, Y, 12, 2, 0, shuffle=False, callbacks=[between])
        logs = model.train_on_batch(X[:1], Y[:1])
        return history.history, logs, model.state()

    assert_exact(written.made(), act)


@check
def what_a_step_is_built_of_is_freed():
    for options in {}, {"updates": "sharded", "remat": True}:
        mine = small.model(keras.layers.BatchNormalization())
        with Strategy(**options), assert_freed():
            small.fit(mine)


@check
def gradients_exchanged_while_the_backward_pass_goes_on():
    cases = conformance.CASES
    ways = [
        ("uneven", {}),
        ("loss-scale-overflow", {"updates": "sharded"}),
        ("gan", {"updates": "sharded"}),
        ("embedding-clipped", {"weights": "sharded", "gather_bytes": 2000}),
        ("sync-batch-norm", {"updates": "sharded", "remat": True}),
    ]
    few = {"_BUCKET_BYTES": 64, "_MOST_BUCKETS": 1000}
    with unittest.mock.patch.multiple(gradient_buckets, **few):
        for name, options in ways:
            assert_one_device(cases[name], **options)
        # Hooks keep what they left out of each gradient.
        for compression in ("fp16-feedback", "power-sgd"):
            model = compiled()()
            with Strategy(compression=compression):
                fit(model)
            assert_finite(model)


@check
def blocks_that_are_computed_again_exchange_no_more():
    one = scopes.train(scopes.PLAIN)
    for options in ({}, {"weights": "sharded", "gather_bytes": 2**10}):
        found = []
        for remat in (None, False):
            strategy = Strategy(remat=remat, **options)
            assert_same_model(scopes.train(scopes.AGAIN, strategy), one)
            found.append(strategy)
        again = ["operations again" in way.describe() for way in found]
        assert again == [True, False]
        first, second = map(scopes.exchanges, found)
        assert first == second


def scaled():
    inner = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


@check
def texts_are_divided():
    def act(model):
        history = model.fit(*case.data(), 16, 2, 0, shuffle=False)
        return history.history, model.predict(case.data()[0], 9, verbose=0)

    ways = {
        "texts_as_long_as_the_longest": {"weights": "sharded", "towers": 2},
        "counted_words_of_texts": {},
    }
    for name, options in ways.items():
        case = CASES[name]
        make = functools.partial(build_again, case)
        assert_exact(make, act, **options)


def counted(words, strategy):
    texts = keras.Input((), dtype="string")
    counts = keras.layers.TextVectorization(
        vocabulary=words, output_mode="count"
    )(texts)
    with strategy:
        given = tf.constant(["a", "b a", "a a", "b"])
        keras.Model(texts, counts).predict(given, verbose=0)
    return strategy.describe()


@check
def ranks_look_words_up_in_tables_that_are_the_same():
    assert "LookupTable" not in counted(["a", "b"], Strategy())
    table = "a table of 2 entries with the checksum"
    with refused("different steps", table, "rank 1"):
        counted(["a", "b"] if RANK else ["b", "a"], Strategy())


@check
def a_table_that_steps_change_is_equal_on_all_ranks():
    """Only rank 0 looks keys up, and all insert what it does."""
    case = CASES["examples_in_a_table"]

    def act(model):
        history = model.fit(*case.data(), 15, 2, 0, shuffle=False)
        keys, entries = model.table.export()
        return history.history, tf.gather(entries, tf.argsort(keys))

    assert_exact(functools.partial(build_again, case), act)


def build_again(case):
    keras.utils.set_random_seed(0)
    return case.build()


@check
def xla_compiles_what_each_rank_computes():
    make = compiled(m.mlp, scaled, jit_compile=True)
    assert_exact(make, lambda model: fit(model, x=X[:21], y=Y[:21]))


@check
def a_batch_of_one_row_leaves_a_rank_with_constants_only():
    """Which TensorFlow would exchange by itself, while it optimizes."""
    make = stacked(
        lambda: [
            keras.layers.Dense(4, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    untuned.do_not_optimize_graphs(False)
    try:
        assert_exact(make, lambda model: model.train_on_batch(X[:1], Y[:1]))
    finally:
        untuned.do_not_optimize_graphs()


@check
def what_a_step_waits_for_is_no_input_of_a_convolution():
    """TensorFlow ends a process that waits so, while it optimizes the step."""

    def make():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        given = keras.Input((8, 8, 3))
        x = inner = layers.Conv2D(4, 3, padding="same")(given)
        for _ in range(2):
            inner = layers.ReLU()(layers.BatchNormalization()(inner))
            inner = layers.Conv2D(4, 3, padding="same", use_bias=False)(inner)
        pooled = layers.GlobalAveragePooling2D()(x + inner)
        model = keras.Model(given, layers.Dense(10)(pooled))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    images = tf.reshape(tf.range(8 * 192.0) % 7, (8, 8, 8, 3))
    untuned.do_not_optimize_graphs(False)
    try:
        assert_exact(
            make, lambda model: model.train_on_batch(images, tf.ones((8, 10)))
        )
    finally:
        untuned.do_not_optimize_graphs()


@check
def ranks_take_as_many_micro_batches_as_one_of_them_needs():
    """Memory ends on rank 1, and in the last batch nobody has much."""
    memory = auto.Memory(auto.COUNT)

    def act(model):
        inside = tf.distribute.has_strategy()
        memory.rows = 4 if inside and RANK == 1 else auto.COUNT
        return auto.fitted(model)

    make = auto.make_in(memory)
    with unittest.mock.patch.dict(OPERATIONS, auto.ON_OWN_ROWS):
        assert_exact(make, act, micro_batches="auto")
    assert bool(memory.failures) == (RANK == 1)


@check
def what_a_step_makes_first_is_that_of_rank_0():
    """Each rank would draw other values for a layer of the loss."""

    def make():
        keras.utils.set_random_seed(1 + RANK)
        model = building.Matched()
        model.compile(keras.optimizers.Adam(0.1))
        return model

    for weights in (None, "sharded"):
        assert_exact(make, building.fitted, weights=weights)


@check
def metrics_that_are_no_sums():
    make = stacked(
        lambda: [keras.layers.Dense(3)],
        metrics=lambda: [building.SmallestScore(), "accuracy"],
    )
    assert_exact(make, lambda model: fit(model, x=X[:13], y=Y[:13]))


class Effects(Stepping):
    """Does in a step what is no variable's, and draws without a seed."""

    def prepare(self):
        self.__dict__["seen"] = []

    def loss_of(self, y, p):
        order = tf.random.shuffle(tf.range(tf.shape(p)[0]))
        return super().loss_of(tf.gather(y, order), tf.gather(p, order))

    def after(self, x, p):
        tf.py_function(lambda v: self.seen.append(v.numpy()), [x], [])
        tf.random.uniform([])


@check
def what_is_no_variable_is_done_by_rank_0():
    calls = []

    def act(model):
        # Batches of which a rank has fewer than the other, or none.
        history = model.fit(X[:25], Y[:25], 8, 2, 0, shuffle=False).history
        calls.append(len(model.seen))
        return history

    assert_exact(Effects.made, act)
    # The reference is a rank's own.
    assert calls == ([8, 8] if RANK == 0 else [0]), calls


class Outside(Stepping):
    """Uses and writes what no layer of it has: on each rank something else."""

    def prepare(self):
        other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        other.set_weights([w + RANK for w in other.get_weights()])
        seeds = keras.random.SeedGenerator(RANK)
        scale = tf.Variable(1.0 + RANK, trainable=False)
        self.__dict__["outside"] = other, seeds, scale

    def loss_of(self, y, p):
        other, seeds, scale = self.__dict__["outside"]
        noise = keras.random.normal((3,), seed=seeds)
        return super().loss_of(y, other(p) * scale + noise)

    def after(self, x, p):
        scale = self.__dict__["outside"][-1]
        scale.assign_add(1.0)


@check
def variables_outside_of_a_model_are_those_of_rank_0():
    """Also where a prediction comes before the first step."""

    def act(model, *callbacks):
        options = {"shuffle": False, "callbacks": [*callbacks]}
        logs = model.fit(X[:25], Y[:25], 8, 2, 0, **options).history
        return logs, model.train_on_batch(X[:5], Y[:5])

    def predict_first(model):
        look = Does(on_epoch_begin=lambda it: it.predict(X[:4], verbose=0))
        return act(model, look)

    for use in (act, predict_first):
        assert_exact(Outside.made, use)


@functools.cache
def scale():
    # Not before TensorFlow has the devices of the job.
    return tf.Variable(1.0)


def scaled_by_what_is_outside():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((X.shape[1],)),
            layers.Dense(4),
            layers.Dropout(0.3),
            layers.BatchNormalization(),
            layers.Lambda(lambda x: x * scale()),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@check
def what_one_rank_writes_between_calls_reaches_all():
    """Values of each kind before each of the first calls; rank 0's count."""
    scale()
    writes = (
        lambda model: setattr(model.optimizer, "learning_rate", 0.02),
        lambda model: model(X[:8], training=True),
        lambda model: model.layers[0].bias.assign_add([1.0] * 4),
        lambda model: model.set_weights([w + 1 for w in model.get_weights()]),
        lambda model: tf.function(lambda: scale().assign_add(0.5))(),
        lambda model: scale().assign(0.25),
    )

    def act(first, model):
        scale().assign(1.0)
        rank = RANK if tf.distribute.has_strategy() else 0
        logs = []
        for call in range(6):
            # Either rank, and not before each call.
            if rank == call // 2 % 2:
                writes[(call + first) % len(writes)](model)
            logs.append(model.train_on_batch(X[:8], Y[:8]))
        logs.append(model.test_on_batch(X[:5], Y[:5]))
        model.layers[0].bias.assign_add([float(rank)] * 4)
        logs.append(model.test_on_batch(X[:5], Y[:5]))
        model.layers[0].bias.assign_add([float(rank)] * 4)
        return logs, model.predict_on_batch(X[:5])

    # Each takes its time; all of them run on other days.
    for first in draw(range(len(writes)), 3)[0]:
        assert_exact(scaled_by_what_is_outside, functools.partial(act, first))


@check
def what_a_callback_writes_outside_of_a_model_is_there_for_the_next_step():
    scale()

    class Anneal(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            scale().assign_add(0.5)

    def act(model):
        scale().assign(1.0)
        anneal = Anneal()
        if tf.distribute.has_strategy():
            anneal = kt.ChiefOnly(anneal)
        return model.fit(
            X, Y, 12, 2, 0, shuffle=False, callbacks=[anneal]
        ).history

    assert_exact(scaled_by_what_is_outside, act)


@check
def what_draws_or_reads_files_in_a_step_is_that_of_rank_0():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{RANK}"
        with open(path, "w") as file:
            file.write("2.5" if RANK == 0 else "7.5")
        # The same name on both ranks, as on hosts of their own.
        with contextlib.chdir(folder):
            os.rename(path, "factor")

            def pooled(x):
                factor = tf.strings.to_number(tf.io.read_file("factor"))
                images = tf.reshape(tf.tile(x, [1, 9]), [-1, 6, 6, 1])
                ratio = [1.0, 1.5, 1.5, 1.0]
                found, _, _ = tf.nn.fractional_max_pool(images, ratio)
                return factor * tf.reshape(found, [-1, 16])

            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.layers.Lambda(pooled, output_shape=(16,)),
                    keras.layers.Dense(1),
                ]
            )
            model.compile("sgd", "mse")
            with Strategy():
                ones = tf.ones((8, 4))
                first = model.train_on_batch(ones, ones[:, :1])
                model.fit(X[:, :4], X[:, :1], verbose=0)
    assert_finite(model)
    assert_same_model(model)
    assert first < 50


@check
def what_python_computes_in_a_step_is_that_of_rank_0():
    def computed(x):
        rows = tf.numpy_function(lambda x: x + RANK, [x], x.dtype)
        rows.set_shape(x.shape)
        factor = tf.py_function(lambda: RANK + 1.5, [], tf.float32)
        factor.set_shape(())
        return rows * factor

    def made():
        shape = X.shape[1:]
        # A layer draws the seed of its weights as it is made.
        keras.utils.set_random_seed(1)
        layers = keras.layers.Lambda(computed, shape), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input(shape), *layers])
        model.compile("sgd", "mse")
        return model

    assert_exact(made, functools.partial(fit, x=X, y=Y))


class Summarized(Stepping):
    """Shows its learning rate and a number where there is a writer."""

    def before(self, x):
        tf.summary.scalar("rate", self.optimizer.learning_rate)
        tf.summary.scalar("number", 0.5)


@check
def rank_0_alone_writes_summaries():
    mine = Summarized.made()
    with tempfile.TemporaryDirectory() as folder:
        board = keras.callbacks.TensorBoard(folder, update_freq=1)
        with Strategy():
            mine.fit(X[:8], Y[:8], verbose=0, callbacks=[board])
    assert_same_model(mine)


class Scaled(Stepping):
    """Has a loss with a factor that Python computes."""

    def loss_of(self, y, p):
        return super().loss_of(y, p * self.factor)


@check
def other_constants_are_refused_unless_they_are_rounded():
    mine = Scaled.made()

    def fit_with(factor, **options):
        mine.factor = factor
        mine.compile("sgd")
        with Strategy(**options):
            mine.fit(X[:8], Y[:8], verbose=0)

    fit_with(0.3 * (1 + 1e-7 * RANK))
    before = mine.get_weights()
    for factor, batches in (
        (0.3 + 0.01 * RANK, "split"),
        (tf.one_hot(RANK, 3).numpy(), "split"),
        (0.3 + 0.01 * RANK, "each"),
    ):
        with refused("constant float32", "steps.py", "self.factor"):
            fit_with(factor, batches=batches)
    assert_all_close(mine.get_weights(), before, 0)
