"""Checks of a worker: what differs between ranks is refused, and named."""

import pathlib
import sys
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.transport.engine_transport import EngineTransport
from tests.kit.compare import assert_all_close
from tests.kit.ranks import check
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1])


def with_option(name, *values):
    """What the ranks call: ``fit`` with another value on each."""
    return [lambda mine, v=v: s.fit(mine, **{name: v}) for v in values]


def set_otherwise(mine):
    mine.layers[0].trainable = s.RANK == 0
    mine.compile("sgd", "mse", jit_compile=s.RANK == 1)
    s.fit(mine, epochs=1 + s.RANK)


def another_model(_):
    s.fit(
        s.eager(outputs=3 + s.RANK, loss=keras.losses.cosine_similarity),
        y=np.zeros((s.COUNT, 1)),
    )


def fewer_examples(mine):
    count = (s.COUNT, s.SHORT)[s.RANK]
    s.fit(mine, s.X[:count], s.Y[:count], batch_size=8)


@check
def what_differs_between_ranks_is_named():
    """Each setting of a model is in ``fit/ranks/test_plain_settings.py``."""
    for calls, *words in (
        (
            (s.fit, lambda mine: mine.predict(s.X)),
            *("rank 0 is at the beginning of fit", "rank 1", "of predict"),
        ),
        (
            (set_otherwise,) * 2,
            *("on some ranks: epochs (rank 0: 1, rank 1: 2)", "jit_compile ("),
            "trainable of layer 1 (Dense) (",
        ),
        (
            with_option("x", s.X, s.X + 1),
            "rank 1 has different examples than rank 0",
        ),
        (
            with_option("callbacks", [kt.Timeline(FOLDER / "one.json")], []),
            "rank 0: Timeline, rank 1: None",
        ),
        (
            (another_model,) * 2,
            "Only on rank 1: sequential/dense_1/kernel [8, 4] float32",
        ),
        ((fewer_examples,) * 2, "rank 0: 7", "rank 1: 3", "each"),
    ):
        mine = s.eager()
        with s.refused(*words), s.Strategy():
            calls[s.RANK](mine)
        assert not tf.distribute.has_strategy()


OTHER = "rank 1 has different examples"
REMEDIES = "leave out `shard`", 'batches="each"'


def generator_of(*batches):
    yield from batches


@check
def other_data_is_refused_before_the_first_update():
    """Of each kind of data, in a graph and eagerly; what is whole trains."""
    whole = tf.data.Dataset.from_tensor_slices((s.X, s.Y))
    shard = whole.shard(2, s.RANK).batch(5)
    # Of the same examples; by the same seed where all set the same.
    order = whole.shuffle(s.COUNT, seed=s.RANK + 1).batch(25)
    keras.utils.set_random_seed(s.RANK)
    noise = whole.batch(25).map(lambda x, y: (x + tf.random.normal([4]), y))
    keras.utils.set_random_seed(3)
    seeded = whole.shuffle(s.COUNT, seed=1).batch(25)
    seeded = seeded.map(lambda x, y: (x + tf.random.normal([4]), y))
    mine = s.model(steps_per_execution=2)
    before = mine.get_weights()
    with s.Strategy():
        for data in shard, order, noise:
            with s.refused(OTHER, *REMEDIES):
                s.fit(mine, data, None)
        for method in mine.evaluate, mine.predict:
            with s.refused(OTHER, *REMEDIES):
                method(shard, verbose=0)
        s.forget_seed()
        with s.refused("without a seed", *REMEDIES):
            s.fit(mine, whole.shuffle(s.COUNT).batch(s.COUNT), None)
        assert_all_close(mine.get_weights(), before, 0)
        with s.refused(OTHER):
            s.fit(mine, seeded, None, validation_data=shard)
        s.fit(mine, seeded, None)
    s.assert_same_model(mine)
    mine = s.eager()
    x = s.X + s.RANK
    with s.Strategy():
        for batch in (x, s.Y), (s.X, s.Y + s.RANK), (x, s.Y):
            with s.refused(OTHER):
                s.fit(mine, generator_of(batch), None, steps_per_epoch=1)
            with s.refused(OTHER):
                s.fit(mine, *batch)
        s.fit(mine, generator_of((s.X, s.Y)), None, steps_per_epoch=1)
        with s.refused(OTHER):
            mine.train_on_batch(x, s.Y)


@check
def other_data_of_an_epoch_that_follows_is_refused():
    """One epoch is the same, as by chance; rounding is no difference."""
    off = [1e-6 * s.RANK]
    data = tf.data.Dataset.from_generator(
        lambda: iter([(s.X + off[0], s.Y)]), output_signature=s.SPEC
    )

    def drift(epoch, logs):
        off[0] *= 1 + epoch * 1e5

    drifts = keras.callbacks.LambdaCallback(on_epoch_begin=drift)
    mine = s.eager()
    with s.Strategy():
        s.fit(mine, data, None, epochs=1, callbacks=[drifts])
        with s.refused(OTHER):
            s.fit(mine, data, None, epochs=2, callbacks=[drifts])


@check
def other_data_later_in_an_epoch_is_refused():
    """As of workers that draw in another order; rounding is no difference."""

    def batches():
        for step in range(3):
            yield s.X + s.RANK * (1 if step == 2 else 1e-6), s.Y

    mine = s.model()
    weights = []
    remember = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(
            mine.get_weights()
        )
    )
    with s.Strategy():
        with s.refused(OTHER, *REMEDIES):
            s.fit(
                mine, batches(), None, steps_per_epoch=3, callbacks=[remember]
            )
        assert len(weights) == 2
        assert_all_close(mine.get_weights(), weights[-1], 0)
        s.fit(mine, batches(), None, steps_per_epoch=2)
    s.assert_same_model(mine)


@check
def data_of_unknown_length_that_ends_early_on_a_rank_is_refused():
    """Within an epoch, and before it; what is whole trains, and ends."""

    def batches(*numbers):
        number = numbers[s.RANK % 2]
        return tf.data.Dataset.from_generator(
            lambda: iter([(s.X, s.Y)] * number), output_signature=s.SPEC
        )

    mine = s.model(steps_per_execution=2)
    by_hand = s.eager()
    with s.Strategy():
        with s.refused("rank 0: more, rank 1: 1", *REMEDIES):
            s.fit(s.model(), batches(3, 1), None)
        for method in mine.fit, mine.evaluate, mine.predict:
            with s.refused("(rank 0: at most 2, rank 1: more)"):
                method(batches(2, 3), verbose=0)
            # Within an execution.
            with s.refused("(rank 0: more, rank 1: at most 4)"):
                method(batches(4, 3), verbose=0)
        with s.refused("(rank 0: at most 2, rank 1: more)"):
            s.fit(mine, validation_data=batches(2, 4))
        with s.refused("rank 0: 2, rank 1: more"):
            s.fit(by_hand, batches(2, 3), None)
        with s.refused("(rank 0: at most 0, rank 1: more)"):
            s.fit(mine, batches(0, 1), None)
        s.fit(mine, batches(3, 3), None, epochs=2)
    s.assert_same_model(mine)
    # A round that would end after the data, or never.
    for steps, which, said in (
        (3, s.model(), "rank 0: 2, rank 1: "),
        (100, mine, "rank 0: at most 2, rank 1: "),
    ):
        with s.Strategy(sync_every=steps):
            before = which.get_weights()
            with s.refused("rank 0: ", "0, rank 1: more"):
                s.fit(which, batches(0, 1), None)
            with s.refused(OTHER):
                s.fit(which, generator_of((s.X + s.RANK, s.Y)), None)
            assert_all_close(which.get_weights(), before, 0)
            with s.refused(said):
                s.fit(which, batches(2, 4), None)
            s.fit(which, batches(3, 3), None)
        s.assert_same_model(which)


@check
def layers_with_other_settings_are_refused():
    """Before a step exchanges anything; in rounds, before their first sum."""

    def made(name, make=s.model):
        # Names and seeds on ranks may differ.
        for _ in range(s.RANK):
            keras.layers.Activation(name)
        dropout = keras.layers.Dropout(0.0, seed=s.RANK)
        return make(keras.layers.Activation(name), dropout, metrics=[])

    def predict(mine):
        return mine.predict(s.X, verbose=0)

    with s.Strategy():
        s.fit(made("relu"))
    name = "tanh" if s.RANK else "relu"
    traced = "operation that differs: rank 0: Relu float32 (", "1: Tanh float32"
    eager = ("rank 1 has other results than rank 0",)
    for make, options, act, words in (
        (s.model, {}, s.fit, traced),
        (s.model, {}, predict, traced),
        (s.model, {"sync_every": 2}, s.fit, traced),
        (s.model, {"sync_every": 100}, s.fit, traced),
        (s.eager, {}, s.fit, eager),
        (s.eager, {}, predict, eager),
    ):
        with s.refused(*words), s.Strategy(**options):
            act(made(name, make))


@check
def other_versions_are_refused():
    mine = {"Keras": f"3.{s.RANK}", "Python": "3.11"}
    said = f"rank {s.RANK} has Keras 3.{s.RANK}, but rank {1 - s.RANK} has"
    with (
        mock.patch.object(EngineTransport, "_compared", False),
        mock.patch.object(rank_checks, "process_facts", lambda engine: mine),
        s.refused(said, "install the same"),
    ):
        s.Strategy()._config.transport.compare_once()


@check
def random_numbers_of_parallel_maps_are_those_of_calls_in_order():
    """Those of a layer, whose state each call writes, and of TensorFlow."""
    draws = {
        "layer": lambda: keras.layers.GaussianNoise(1.0, seed=5),
        "function": lambda: lambda x, training: x + tf.random.normal([4]),
    }

    def data(draw, calls):
        keras.utils.set_random_seed(3)
        noise = draw()
        rows = tf.data.Dataset.from_tensor_slices((s.X, s.Y)).map(
            lambda x, y: (noise(x, training=True), y), num_parallel_calls=calls
        )
        return rows.batch(25)

    for name, draw in draws.items():
        with s.Messages() as messages:
            s.assert_as_one_process(
                s.eager(),
                lambda mine, d=draw: s.fit(mine, data(d, 8), None, epochs=2),
                reference=lambda m, d=draw: s.fit(
                    m, data(d, None), None, epochs=2
                ),
            )
        assert messages.have("differences.py:") == (s.RANK == 0), name
        strategy = s.Strategy()
        distribute = strategy.experimental_distribute_dataset
        found = [
            s.gather(x.numpy().tolist()) for x, _ in distribute(data(draw, 8))
        ]
        wanted = [x.numpy() for x, _ in data(draw, None)]
        assert_all_close([np.concatenate(rows) for rows in found], wanted)
