"""A worker of parameter servers: what users do with several, and refusals.

``CHUNK_BYTES`` says how large the chunks are in which weights are updated.
"""

import contextlib
import functools
import os
import pathlib
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.foundation import settings
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.cases import CASES
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from keras_towers.replicas import named_resources
from tests.kit.compare import assert_close
from tests.kit.ranks import check, main
from tests.processes import (
    exact,  # noqa: F401
    small as s,
)

settings.CHUNK_BYTES = int(os.environ.get("CHUNK_BYTES", settings.CHUNK_BYTES))
FOLDER = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path()


def train(mine, **options):
    return s.fit(mine, **{"batch_size": 25, **options})


@check
def callbacks_reach_the_optimizer_once_and_restore_the_best_weights():
    def act(mine):
        never = {"monitor": "val_loss", "min_delta": 9.0}
        callbacks = [
            keras.callbacks.ReduceLROnPlateau(**never, factor=0.5, patience=0),
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: rate * 0.9
            ),
            keras.callbacks.EarlyStopping(
                **never, patience=2, restore_best_weights=True
            ),
        ]
        history = train(
            mine, epochs=5, validation_data=(s.X, s.Y), callbacks=callbacks
        )
        assert len(history.epoch) == 3
        return float(mine.optimizer.learning_rate), history.history["val_loss"]

    with s.Messages() as messages:
        s.assert_as_one_process(s.model(), act)
    assert not messages.have("not be those of one device")


@check
def the_chief_stops_all_after_the_same_step():
    """Another worker stops nobody: its rows of each batch would be lost."""
    mine, alone, strategy = s.model(), s.eager(), s.Strategy()
    for stops, event, epochs in (
        (1, "on_epoch_end", 3),
        (0, "on_epoch_end", 1),
        (1, "on_train_batch_end", 3),
        (0, "on_train_batch_end", 1),
    ):

        def stop(model, stops=stops):
            model.stop_training = stops == s.RANK

        def act(model, event=event, epochs=epochs, stop=stop):
            callbacks = [s.Does(**{event: stop})]
            history = train(model, epochs=3, callbacks=callbacks)
            assert len(history.epoch) == epochs

        s.assert_as_one_process(
            mine, act, alone, strategy=strategy, tolerance=None
        )
        assert_ordinary(mine)


@check
def workers_begin_an_epoch_with_what_the_chiefs_callbacks_have_written():
    """Whatever callbacks of other workers have written."""

    def halve(model):
        if s.RANK == 0:
            time.sleep(0.2)
            model.set_weights([w / 2 for w in model.get_weights()])

    def forget(model):
        if s.RANK > 0:
            model.set_weights([w * 0 for w in model.get_weights()])

    halves = s.Does(on_epoch_begin=halve, on_epoch_end=halve)
    forgets = s.Does(on_epoch_end=forget)
    s.assert_as_one_process(
        s.model(),
        lambda it: train(it, epochs=3, callbacks=[halves, forgets]),
        tolerance=None,
    )


@check
def chief_saves_a_plain_model_from_which_training_goes_on():
    folder = FOLDER / "saved"
    mine, alone = s.model(), s.eager()
    with (strategy := s.Strategy()):
        save = keras.callbacks.ModelCheckpoint(folder / f"{s.RANK}.keras")
        train(mine, callbacks=[save])
    s.gather("saved")
    assert not (folder / "1.keras").exists()
    loaded = keras.models.load_model(folder / "0.keras")
    assert_ordinary(loaded)
    with strategy:
        train(loaded)
    train(alone, epochs=2)
    s.assert_same_model(loaded, alone)


@check
def models_and_fits_in_turns_also_in_another_block():
    def trained(one, other, block):
        with block():
            one.layers[0].trainable = False
            one.compile("sgd", "mse", run_eagerly=one.run_eagerly)
            train(one)
            train(other)
            outputs = one.predict(s.X, verbose=0)
        with block():
            one.layers[0].trainable = True
            one.compile("sgd", "mse", run_eagerly=one.run_eagerly)
            train(one)
        return outputs

    mine = s.model(), s.model(seed=1)
    alone = s.eager(), s.eager(seed=1)
    outputs = trained(*mine, s.Strategy)
    if s.RANK == 0:
        wanted = trained(*alone, contextlib.nullcontext)
        assert_close(outputs, wanted)
    for one, other in zip(mine, alone, strict=True):
        s.assert_same_model(one, other)
        assert_ordinary(one)


@check
def unequal_lengths_end():
    mine, count = s.model(seed=s.RANK), (s.COUNT, s.SHORT)[s.RANK]
    with s.Strategy(batches="each"):
        history = s.fit(mine, s.X[:count], s.Y[:count], batch_size=8, epochs=2)
    assert len(history.epoch) == 2
    s.assert_same_model(mine)
    assert np.isfinite(mine.get_weights()[0]).all()


@check
def a_generator_that_ends_early_is_named():
    """Although every worker is to read the same data."""

    def some():
        for first in range(0, (40, 20)[s.RANK], 10):
            yield s.X[first : first + 10], s.Y[first : first + 10]

    mine = s.model()
    with s.refused("different data: worker 1 has ended epoch 1"), s.Strategy():
        mine.fit(some(), verbose=0)
    assert_ordinary(mine)


@check
def masks_are_of_the_own_part_and_warned_of():
    mine = CASES["mask"].build()
    with s.Messages() as messages, s.Strategy():
        s.fit(mine, m.SENTENCES[:9], m.SENTENCE_LABELS[:9])
    words = "With SyncReplicasStrategy, each worker computes"
    assert messages.have(words) == (s.RANK == 0)


@check
def sums_over_the_batch_are_of_all_workers():
    """Whatever a loss divides by, and with fewer examples than workers."""

    def summed():
        return s.model(
            keras.layers.Dropout(0.5, seed=1),
            loss=keras.losses.MeanSquaredError(reduction="sum"),
            optimizer=keras.optimizers.SGD(0.01),
        )

    mine, alone = summed(), summed()
    # All take the chief's.
    mine.layers[-1].seed_generator.state.assign([7 + s.RANK, 0])
    alone.layers[-1].seed_generator.state.assign([7, 0])
    with s.Messages() as messages:
        s.assert_as_one_process(
            mine,
            lambda it: s.fit(it, s.X[:33], s.Y[:33], batch_size=16, epochs=2),
            alone,
            tolerance=None,
        )
    assert not messages.have("from its own part, so")


@check
def who_has_no_examples_writes_no_state():
    layer = keras.layers.BatchNormalization(momentum=0.5)
    mine, seen = s.model(layer), []

    def look(mine):
        seen.append([float(np.sum(v)) for v in mine.non_trainable_variables])

    with s.Strategy():
        watch = s.Does(on_epoch_end=look)
        s.fit(mine, s.X[:1], s.Y[:1], epochs=2, callbacks=[watch])
    assert np.isfinite(mine.get_weights()[0]).all()
    assert np.isfinite(seen).all()
    assert (seen[0] == seen[1]) == (s.RANK > 0), seen


class Noise(keras.layers.Layer):
    """Notes which of many units a Dropout has kept."""

    def build(self, shape):
        self.drop = keras.layers.Dropout(0.5)
        self.kept = self.add_weight(
            shape=(64,), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        ones = tf.ones((1, 64))
        mask = self.drop(ones, training=training)
        self.kept.assign(tf.reshape(mask, (64,)))
        return x


@check
def workers_with_data_of_their_own_draw_masks_of_their_own():
    """Although all set one seed, as scripts do."""
    mine, kept = s.model(Noise()), []
    look = s.Does(
        on_train_batch_end=lambda mine: kept.append(
            mine.layers[-1].kept.numpy().tolist()
        )
    )
    with s.Strategy(batches="each"):
        s.fit(mine, s.X[:16], s.Y[:16], batch_size=8, callbacks=[look])
    masks = [tuple(mask) for rank in s.gather(kept) for mask in rank]
    assert len(set(masks)) == len(masks) == 2 * len(s.gather(None)), masks


@check
def gradients_that_are_not_scaled_are_summed():
    workers = len(s.gather(None))
    s.assert_as_one_process(
        s.model(optimizer=keras.optimizers.SGD(0.01)),
        train,
        s.eager(optimizer=keras.optimizers.SGD(0.01 * workers)),
        strategy=kt.DistributedReplicatedStrategy(scale_gradient=False),
        tolerance=None,
    )


@check
def other_usage_is_refused():
    mine, strategy = s.model(), s.Strategy()
    with s.refused("trains only with fit()"), strategy:
        mine.train_on_batch(s.X, s.Y)
    assert_ordinary(mine)
    with s.refused("needs compiled steps"), strategy:
        s.fit(s.eager())
    s.gather("refused")
    mine = s.model(outputs=3 + s.RANK, loss=keras.losses.cosine_similarity)
    with (
        s.refused("Only on rank 1: sequential/dense_1/kernel [8, 4]"),
        strategy,
    ):
        s.fit(mine, y=np.zeros((s.COUNT, 1)))
    assert_ordinary(mine)
    s.gather("refused again")
    mine = s.model(keras.layers.Activation(["relu", "tanh"][s.RANK % 2]))
    with s.refused("another step than worker"), strategy:
        s.fit(mine)
    assert_ordinary(mine)


@check
def model_is_ordinary_after_an_error_in_every_worker():
    mine = s.model()
    with pytest.raises(s.Boom), s.Strategy():
        train(mine, callbacks=[s.breaks_behind(1)])
    assert_ordinary(mine)
    s.fit(mine)


def interrupt_worker_1(*_):
    if s.RANK == 1:
        raise KeyboardInterrupt("by hand")


@check
def an_error_that_one_worker_survives_is_one_of_all():
    mine, waits = s.model(), s.RANK == 0
    error = kt.TowerError if waits else KeyboardInterrupt
    stops = s.Does(on_train_batch_end=interrupt_worker_1)
    with pytest.raises(error, match="by hand") as caught, s.Strategy():
        train(mine, callbacks=[stops])
    assert ("because it failed on worker 1" in str(caught.value)) == waits
    with s.Strategy():
        train(mine)
    s.assert_same_model(mine)


def assert_counted(strategy, updates, used):
    """The chief has counted gradients, and has told the others."""
    counts, size = strategy.counts, len(s.gather(None))
    found = counts.updates, counts.used, counts.dropped
    assert found == (updates, (used,) * size, (0,) * size), counts


def asks_for_counts(strategy):
    """What a callback sees of them, in the middle of a fit."""

    def ask(batch, logs):
        if s.RANK == 0:
            assert strategy.counts.updates <= batch + 1
            return
        with s.refused("only the chief knows counts"):
            print(strategy.counts)

    return keras.callbacks.LambdaCallback(on_train_batch_end=ask)


@check
def trains_exactly_again_and_again():
    x, y = s.X[:36], s.Y[:36]
    alone, held = s.eager(optimizer="adam"), []
    s.fit(alone, x, y, batch_size=12)
    for _ in range(2):
        mine = s.model(optimizer="adam")
        with kt.SyncReplicasStrategy() as strategy:
            callbacks = [asks_for_counts(strategy)]
            s.fit(mine, x, y, batch_size=12, callbacks=callbacks)
        s.assert_same_model(mine, alone)
        assert_counted(strategy, 3, 3)
        held.append(len(named_resources._known))
    # Those of the last few models only.
    assert held[-1] == held[-2], held


@check
def workers_compute_several_gradients_of_an_update():
    def act(model, batch_size):
        s.fit(model, s.X[:48], s.Y[:48], batch_size=batch_size, epochs=2)

    wanted = 2 * len(s.gather(None))
    strategy = kt.SyncReplicasStrategy(replicas_to_aggregate=wanted)
    s.assert_as_one_process(
        s.model(optimizer="adam"),
        functools.partial(act, batch_size=12),
        s.eager(optimizer="adam"),
        functools.partial(act, batch_size=24),
        strategy,
        tolerance=None,
    )
    assert_counted(strategy, 4, 8)


if __name__ == "__main__":
    main()
