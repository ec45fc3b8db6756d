"""A worker of parameter servers: the exactness contract, and wrong usage."""

import contextlib
import dataclasses
import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from tests.exactness.cases import CASES
from tests.exactness.contract import on_one_device
from tests.kit.compare import assert_same, close, outcome
from tests.kit.ordinary import assert_ordinary
from tests.kit.ranks import CHECKS, check, main
from tests.processes.small import (
    COUNT,
    RANK,
    SHORT,
    Messages,
    Strategy,
    X,
    Y,
    gather,
    model,
    refused,
)

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def same_model_on_all(mine, reference=None):
    """Weights are equal on all workers, and near those of a reference."""
    told = gather([w.tobytes() for w in mine.get_weights()])
    assert all(other == told[0] for other in told)
    assert_ordinary(mine)
    if reference is not None:
        for a, b in zip(
            mine.get_weights(), reference.get_weights(), strict=True
        ):
            close(a, b)


def comparable(result):
    """Leave out what each worker has counted for itself."""
    own = {
        variable.path
        for metric in result.model.metrics
        for variable in metric.variables
    }
    values = [(path, value) for path, value in result.values if path not in own]
    returned = {k: v for k, v in result.returned.items() if "val_" in k}
    return dataclasses.replace(result, values=values, returned=returned)


def trains_as_one_device(name, towers):
    """Weights and optimizer: of one device, and on all workers."""
    case = CASES[name]
    strategy = Strategy(towers=towers)
    try:
        found = comparable(outcome(case.build, case.fit, strategy))
        values = [(path, value.tobytes()) for path, value in found.values]
    except BaseException:
        # The others would take what the next check tells for this one's.
        strategy._config.peers.gather_objects("failed")
        raise
    first, *others = strategy._config.peers.gather_objects(values)
    for rank, other in enumerate(others, 1):
        odd = [a for a, b in zip(first, other, strict=True) if a[1] != b[1]]
        assert not odd, f"rank {rank} differs from rank 0: {odd}"
    if RANK == 0:
        assert_same(found, comparable(on_one_device(name)), case.tolerance)


for case in CASES:
    CHECKS[case] = functools.partial(trains_as_one_device, case, 1)
    CHECKS[f"{case} on two towers"] = functools.partial(
        trains_as_one_device, case, 2
    )


@check
def callbacks_reach_the_optimizer_once():
    def trained(strategy):
        made = model()
        with strategy:
            history = made.fit(
                X,
                Y,
                batch_size=10,
                epochs=4,
                shuffle=False,
                verbose=0,
                validation_data=(X, Y),
                callbacks=[
                    keras.callbacks.ReduceLROnPlateau(
                        "val_loss", factor=0.5, patience=0, min_delta=9.0
                    ),
                    keras.callbacks.LearningRateScheduler(
                        lambda epoch, rate: rate * 0.9
                    ),
                ],
            )
        rate = float(made.optimizer.learning_rate)
        return made, history.history["val_loss"], rate

    found, losses, rate = trained(Strategy())
    wanted, expected, wanted_rate = trained(contextlib.nullcontext())
    assert rate == wanted_rate, (rate, wanted_rate)
    close(losses, expected)
    same_model_on_all(found, wanted)


@check
def worker_that_stops_leaves():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = RANK == 1

    mine = model()
    with Strategy():
        history = mine.fit(X, Y, epochs=3, verbose=0, callbacks=[Stop()])
    assert len(history.epoch) == (1 if RANK else 3)
    same_model_on_all(mine)


@check
def best_weights_of_the_chief_are_restored():
    mine = model()
    stop = keras.callbacks.EarlyStopping(
        "val_loss", patience=1, min_delta=9.0, restore_best_weights=True
    )
    first = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if not first:
                first.extend(self.model.get_weights())

    with Strategy():
        mine.fit(
            X,
            Y,
            epochs=5,
            verbose=0,
            validation_data=(X, Y),
            callbacks=[Keep(), stop],
        )
    if RANK == 0:
        for a, b in zip(first, mine.get_weights(), strict=True):
            close(b, a)
    same_model_on_all(mine)


@check
def chief_saves_a_plain_model_from_which_training_goes_on():
    folder = FOLDER / "saved"
    mine, reference = model(), model()
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}
    strategy = Strategy()
    with strategy:
        save = keras.callbacks.ModelCheckpoint(folder / f"{RANK}.keras")
        mine.fit(X, Y, epochs=2, callbacks=[save], **options)
    gather("saved")
    assert not (folder / "1.keras").exists()
    loaded = keras.models.load_model(folder / "0.keras")
    assert_ordinary(loaded)
    with strategy:
        loaded.fit(X, Y, epochs=2, **options)
    reference.fit(X, Y, epochs=4, **options)
    same_model_on_all(loaded, reference)


@check
def two_models_and_two_fits_in_one_block():
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}

    def trained(strategy):
        one, other = model(), model(outputs=3, seed=1)
        with strategy:
            one.fit(X, Y, epochs=2, **options)
            other.fit(X, Y, **options)
            one.fit(X, Y, **options)
            outputs = one.predict(X, verbose=0)
        return one, other, outputs

    *found, outputs = trained(Strategy())
    *wanted, expected = trained(contextlib.nullcontext())
    close(outputs, expected)
    for a, b in zip(found, wanted, strict=True):
        same_model_on_all(a, b)


@check
def compiled_again_stopped_and_in_another_block():
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}

    class ChiefStops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = RANK == 0 or alone

    def trained(strategy):
        mine = model()
        with strategy:
            mine.layers[0].trainable = False
            mine.compile("sgd", "mse")
            mine.fit(X, Y, **options)
            mine.layers[0].trainable = True
            mine.compile("sgd", "mse")
            mine.fit(X, Y, **options)
            stopped = mine.fit(
                X, Y, epochs=3, callbacks=[ChiefStops()], **options
            )
        with strategy:
            mine.fit(X, Y, **options)
        return mine, stopped.epoch

    alone = False
    mine, epochs = trained(Strategy())
    alone = True
    reference, expected = trained(contextlib.nullcontext())
    assert epochs == expected == [0]
    same_model_on_all(mine, reference)


@check
def unequal_lengths_end():
    mine = model(seed=RANK)
    count = (COUNT, SHORT)[RANK]
    with Strategy(batches="each"):
        history = mine.fit(
            X[:count], Y[:count], batch_size=8, epochs=2, verbose=0
        )
    assert len(history.epoch) == 2
    same_model_on_all(mine)
    assert np.isfinite(mine.get_weights()[0]).all()


@check
def masks_are_of_the_own_part_and_warned_of():
    for name, warned in (("mask", True), ("uneven", False)):
        with Messages() as messages:
            outcome(CASES[name].build, CASES[name].fit, Strategy())
        assert messages.have("weights will differ") == warned, name


@check
def other_usage_is_refused():
    mine = model()
    strategy = Strategy()
    with refused("trains by fit() only"), strategy:
        mine.train_on_batch(X, Y)
    assert_ordinary(mine)
    mine.compile("sgd", "mse", run_eagerly=True)
    with refused("needs compiled steps"), strategy:
        mine.fit(X, Y, verbose=0)
    gather("refused")
    mine = model(outputs=3 + RANK)
    mine.compile("sgd", keras.losses.cosine_similarity)
    with refused("dense_1/kernel [8, 3]", "dense_1/kernel [8, 4]"), strategy:
        mine.fit(X, np.zeros((COUNT, 1)), verbose=0)
    assert_ordinary(mine)


@check
def model_is_ordinary_after_an_error_in_every_worker():
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("power cut")

    mine = model()
    with pytest.raises(RuntimeError), Strategy():
        mine.fit(X, Y, batch_size=10, verbose=0, callbacks=[Fail()])
    assert_ordinary(mine)
    mine.fit(X, Y, verbose=0)


if __name__ == "__main__":
    main()
