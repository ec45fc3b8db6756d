"""Checks of a worker: what users do with a strategy on two ranks."""

import functools
import random
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step.running import adaptive_function
from keras_towers.foundation import compat
from keras_towers.inspection.conformance.case_models import ByHand
from tests.kit.compare import assert_close
from tests.kit.ranks import check
from tests.processes import small as s


@check
def weights_optimizer_shuffles_and_draws_are_those_of_rank_0():
    """Whatever each rank has trained before, and however it names layers."""

    def trained_once(rank):
        made = s.eager(
            keras.layers.Dropout(0.3, seed=rank),
            seed=rank,
            before=1 - rank,
            optimizer=keras.optimizers.Adam(0.01),
        )
        made.train_on_batch(s.X, s.Y * (rank + 1))
        return made

    def act(mine):
        keras.utils.set_random_seed(3)
        return s.fit(mine, epochs=2, batch_size=26, shuffle=True)

    mine = trained_once(s.RANK)
    mine.run_eagerly = False
    s.assert_as_one_process(mine, act, trained_once(0))
    assert int(mine.optimizer.iterations) == 1 + 4


class Batches(keras.utils.PyDataset):
    """Notes which examples are read, in which order."""

    def __init__(self, **options):
        super().__init__(**options)
        self.read = []

    def __len__(self):
        return 5

    def __getitem__(self, index):
        self.read.append(index)
        return s.X[index::10], s.Y[index::10]


class Noise(keras.layers.Layer):
    """Adds noise to what it notes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x):
        tf.py_function(lambda v: self.seen.append(v.numpy()), [x], [])
        return x + tf.random.normal(tf.shape(x))


@check
def unseeded_shuffles_and_draws_of_eager_steps_agree():
    noise, batches = Noise(), Batches()
    mine = keras.Sequential([noise, *s.eager().layers])
    mine.compile("sgd", "mse", run_eagerly=True)
    draws_alone = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            tf.random.normal(()) if s.RANK == 0 else None
        )
    )
    s.forget_seed()
    random.seed(s.RANK)
    with s.Strategy(sync_every_epoch=False):
        options = {"epochs": 2, "shuffle": True, "callbacks": [draws_alone]}
        s.fit(mine, batch_size=s.COUNT, **options)
        # What runs eagerly does so on the whole batch.
        first, second = noise.seen[-2:]
        s.fit(mine, batches, None, **options)
    for part in (first, second):
        assert (np.sort(part, 0) == np.sort(s.X, 0)).all()
        s.assert_equal_on_ranks(part.tobytes())
    assert (first != second).any()
    # The seed of steps is not that of the script.
    assert compat.global_seed() is None
    s.assert_equal_on_ranks(batches.read)
    s.assert_same_model(mine)


@check
def other_rates_and_batches_smaller_than_the_ranks_are_warned_of():
    """What is trained is what rank 0 trains by itself."""

    def made(rank):
        return s.eager(optimizer=keras.optimizers.SGD(0.01 * (rank + 1)))

    with s.Messages() as messages:
        s.assert_as_one_process(
            made(s.RANK),
            lambda mine: s.fit(mine, s.X[:3], s.Y[:3], batch_size=1),
            made(0),
        )
    for words in "different learning rates", "a batch of 1 cannot occupy 2":
        assert messages.have(words) == (s.RANK == 0)


@check
def rank_0_tells_of_parts_with_other_rows():
    def step(model, data, _):
        errors = (model.net(data["x"]) - data["y"]) ** 2
        return tf.reduce_mean(errors) * tf.reduce_sum(data["factors"])

    parts = {"x": s.X[:6], "y": s.Y[:6], "factors": s.X[:2, 0]}
    data = tf.data.Dataset.from_generator(
        lambda: iter([parts]),
        output_signature={
            name: tf.TensorSpec((None, *part.shape[1:]), part.dtype)
            for name, part in parts.items()
        },
    )
    mine = ByHand(step, net=s.model())
    mine.compile("sgd")
    with mock.patch.object(adaptive_function, "announce") as say, s.Strategy():
        s.fit(mine, data, None)
    said = [call.args[0] for call in say.call_args_list]
    told = any("not have one row per example" in text for text in said)
    assert told == (s.RANK == 0), said
    s.assert_same_model(mine)


class OnOneRank(keras.metrics.MeanAbsoluteError):
    def update_state(self, *given, **options):
        if s.RANK == 1:
            raise ValueError("a file is missing")
        return super().update_state(*given, **options)


@check
def a_model_that_only_one_rank_can_build_is_refused():
    """Its step would build it, and exchange values for that."""
    mine = keras.Sequential([keras.layers.Dense(3)])
    mine.compile("sgd", "mse", metrics=[OnOneRank()])
    said = "rank 0: built; rank 1: ValueError: a file is missing"
    with s.Strategy(), s.refused(said):
        s.fit(mine)


@check
def any_method_starts_with_the_weights_of_rank_0():
    """And with those that rank 0 has loaded between two calls."""
    x, y = s.X[:9], s.Y[:9]
    loaded = [w + 1 for w in s.eager().get_weights()]

    def twice(act, mine):
        found = act(mine)
        if s.RANK == 0:
            mine.set_weights(loaded)
        return found, act(mine)

    for act in (
        lambda it: it.train_on_batch(x, y),
        lambda it: it.test_on_batch(x, y),
        lambda it: it.predict_on_batch(x),
        functools.partial(twice, lambda it: it.evaluate(x, y, 7, verbose=0)),
        functools.partial(twice, lambda it: it.predict(x, 7, verbose=0)),
    ):
        s.assert_as_one_process(s.eager(seed=s.RANK), act)


@check
def variables_that_a_step_creates_are_those_of_rank_0():
    """Of a model that cannot be called on what its step gets."""

    def step(model, data, _):
        return tf.reduce_mean((model.net(data["x"]) - data["y"]) ** 2)

    def made(seed, **options):
        keras.utils.set_random_seed(seed)
        built = ByHand(step, net=keras.Sequential([keras.layers.Dense(3)]))
        built.compile("sgd", **options)
        return built

    for eagerly in (False, True):
        s.assert_as_one_process(
            made(s.RANK, run_eagerly=eagerly),
            lambda it: s.fit(it, {"x": s.X, "y": s.Y}, None, batch_size=25),
            made(0, run_eagerly=True),
        )


@check
def statistics_of_each_tower_are_averaged():
    normalised = keras.layers.BatchNormalization(momentum=0.5)
    mine = keras.Sequential(
        [
            keras.layers.Input((4,)),
            normalised,
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    mine.compile("sgd", "mse")
    with s.Strategy(batch_norm="tower"):
        s.fit(mine, batch_size=10)
        mine.train_on_batch(s.X[:10], s.Y[:10])
    s.assert_equal_on_ranks([v.numpy().tolist() for v in mine.variables])
    # Rows 0-4 and 5-9 of every ten, on ranks 0 and 1.
    moving_mean = np.zeros((2, 4))
    for first in [*range(0, s.COUNT, 10), 0]:
        rows_of_ranks = s.X[first : first + 10].reshape(2, 5, 4)
        moving_mean = 0.5 * moving_mean + 0.5 * rows_of_ranks.mean(1)
    assert_close(normalised.moving_mean, moving_mean.mean(0))


# Of each rank, which then has four batches or two.
OWN_BATCH = 16


def batches_of(*lengths):
    """The global batches of ranks that read their own first examples."""
    for start in range(0, max(lengths), OWN_BATCH):
        ends = [min(start + OWN_BATCH, n) for n in lengths if start < n]
        yield tuple(
            np.concatenate([a[start:end] for end in ends]) for a in (s.X, s.Y)
        )


def dataset_of(*lengths):
    return tf.data.Dataset.from_generator(
        lambda: batches_of(*lengths), output_signature=s.SPEC
    )


OWN_COUNT = s.SHORT if s.RANK else s.COUNT


@check
def own_data_of_unequal_length():
    """Of a length that is known, or is not, and of what can be read once."""
    own = s.X[:OWN_COUNT], s.Y[:OWN_COUNT]
    both = [np.concatenate([a[: s.COUNT], a[: s.SHORT]]) for a in (s.X, s.Y)]
    dataset, strategy = dataset_of(OWN_COUNT), s.Strategy(batches="each")

    def made(make, **options):
        # What it draws is that of one process, too.
        return make(keras.layers.Dropout(0.4, seed=5), **options)

    for mine, x, y, epochs in (
        (made(s.model, seed=s.RANK, steps_per_execution=3), dataset, None, 2),
        (made(s.eager, seed=s.RANK), batches_of(OWN_COUNT), None, 1),
        (
            made(s.model, seed=s.RANK),
            tf.data.Dataset.from_tensor_slices(own).batch(OWN_BATCH),
            *(None, 2),
        ),
        (made(s.eager, seed=s.RANK), *own, 2),
    ):
        fit = functools.partial(s.fit, epochs=epochs, batch_size=OWN_BATCH)
        together = dataset_of(s.COUNT, s.SHORT)
        s.assert_as_one_process(
            mine,
            functools.partial(fit, x=x, y=y, validation_data=own),
            made(s.eager),
            reference=functools.partial(
                fit, x=together, y=None, validation_data=tuple(both)
            ),
            strategy=strategy,
        )
    batches, endless = [], dataset.repeat()
    noted = s.Does(on_predict_batch_end=batches.append)
    with strategy:
        found = mine.predict(own[0], OWN_BATCH, verbose=0, callbacks=[noted])
        assert len(found) == OWN_COUNT
        s.fit(mine, endless, None, steps_per_epoch=5)
        mine.predict(endless, steps=2 + s.RANK, verbose=0)
        with s.refused("steps_per_epoch (rank 0: 3, rank 1: 4)"):
            s.fit(mine, endless, None, steps_per_epoch=3 + s.RANK)
        with s.refused("steps (rank 0: 3, rank 1: 4)"):
            mine.evaluate(endless, steps=3 + s.RANK, verbose=0)
    assert s.gather(len(batches)) == [4, 2]
    assert int(mine.optimizer.iterations) == 2 * 4 + 5


class BelowMaximum(keras.layers.Layer):
    """Needs the largest values of all ranks' rows: gathers of equal parts."""

    def call(self, x):
        return x - keras.ops.max(x, axis=0, keepdims=True)


@check
def own_data_of_other_static_shapes():
    """Some ranks know sizes that others do not know, or have other ones."""

    def made(length):
        keras.utils.set_random_seed(1)
        layers = keras.layers
        mine = keras.Sequential(
            [
                keras.Input((length, 2)),
                layers.Dense(4),
                layers.BatchNormalization(),
                BelowMaximum(),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )
        mine.compile("sgd", "mse", metrics=["mae"])
        return mine

    def act(mine, data):
        logs = s.fit(mine, data, None, epochs=2).history
        return logs, mine.evaluate(data, verbose=0)

    x, strategy = s.X.reshape(s.COUNT, 2, 2), s.Strategy(batches="each")
    whole = {"drop_remainder": True}
    for length, end, options in (2, 26, whole), (None, 25, {}):
        # Each rank has two batches, rank 0 of 8 rows, and rank 1 of 5 or fewer.
        rows = [(0, 8), (8, 16)], [(16, 21), (21, end)]
        both = [
            tuple(np.concatenate([a[i:j], a[k:m]]) for a in (x, s.Y))
            for (i, j), (k, m) in zip(*rows, strict=True)
        ]
        together = tf.data.Dataset.from_generator(
            functools.partial(iter, both),
            output_signature=(
                tf.TensorSpec((None, 2, 2)),
                tf.TensorSpec((None, 3)),
            ),
        )
        first, last = rows[s.RANK]
        mine = slice(first[0], last[1])
        own = tf.data.Dataset.from_tensor_slices((x[mine], s.Y[mine]))
        own = own.batch(5, **options) if s.RANK else own.batch(8, **whole)
        trained = made(length)
        s.assert_as_one_process(
            trained,
            functools.partial(act, data=own),
            made(length),
            reference=functools.partial(act, data=together),
            strategy=strategy,
        )
        with strategy:
            found = trained.predict(own, verbose=0)
        assert len(found) == len(x[mine])
    # Only rank 0 knows the shape of what is gathered.
    spec = own.element_spec
    if s.RANK:
        spec = (tf.TensorSpec((None, None, 2)), spec[1])
    unknown = tf.data.Dataset.from_generator(lambda: own, output_signature=spec)
    trained = made(None)
    with strategy:
        s.fit(trained, unknown, None)
    s.assert_same_model(trained)


@check
def ranks_that_drift_are_equal_at_the_end_of_an_epoch():
    """What a callback writes reaches all ranks; what data do, does not."""
    for sync in (True, False):
        mine = s.eager()

        def drifting(weight=mine.trainable_variables[0]):
            for x, y in batches_of(s.COUNT):
                yield x, y
                # Less than what ranks compare of the first step.
                if s.RANK == 1:
                    weight.assign(weight + 1e-6)

        with s.Strategy(sync_every_epoch=sync):
            s.fit(mine, drifting(), None)
        first, other = s.gather(mine.get_weights()[0].tobytes())
        assert (first == other) == sync


@check
def a_rank_leaves_a_block_by_itself_whatever_it_has_made():
    """Others may have freed a model, never made it, or be training still."""
    with s.Strategy():
        mine = s.model()
        s.fit(mine)
        total = mine.metrics[0].variables[0]
        before = float(total.value)
        own = [s.model(seed=1) for _ in range(s.RANK)]
    if own:
        own[0].evaluate(s.X, s.Y, verbose=0)
    assert float(total.value) == before
    with pytest.raises(s.Boom), s.Strategy() as strategy:
        mine = s.model()
        s.fit(mine)
        total = mine.metrics[0].variables[0]
        # The replicas go on with it.
        s.own_step(strategy, mine)((s.X[:25], s.Y[:25]))
        assert_close(total.value.read_value(), before)
        if s.RANK == 0:
            s.gather("rank 1 has left")
        raise s.Boom
    if s.RANK == 0:
        # Which has the whole sum; of the replicas of rank 1 it knows nothing.
        np.testing.assert_allclose(total.numpy(), before, rtol=1e-6)
    if s.RANK == 1:
        s.gather("rank 1 has left")
