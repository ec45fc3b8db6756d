"""Checks of a worker: a rank that wants to leave a loop, on two ranks."""

import os
import pathlib
import signal
import sys

import keras
import numpy as np

import keras_towers as kt
from tests.kit.ranks import check
from tests.processes.small import (
    RANK,
    Messages,
    Strategy,
    X,
    Y,
    assert_equal_on_ranks,
    assert_same_history,
    assert_same_model,
    gather,
    model,
    refused,
)

FOLDER = pathlib.Path(sys.argv[1])


class Count(keras.callbacks.Callback):
    """Counts the batches."""

    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


class Stop(keras.callbacks.Callback):
    """Stops a loop at one of its events, on one rank."""

    def __init__(self, event, batch=None, rank=0):
        super().__init__()
        if rank == RANK:
            setattr(
                self,
                event,
                lambda at=None, logs=None: self.stop(at, batch),
            )

    def stop(self, position, batch):
        if batch in (None, position):
            self.model.stop_training = True
            self.model.stop_evaluating = True
            self.model.stop_predicting = True


@check
def stop_in_mid_epoch():
    # On either rank, around a batch, in the first epoch or before its batches.
    for event, batch, done, rank in (
        ("on_train_batch_end", 1, 2, 1),
        ("on_train_batch_begin", 1, 2, 0),
        ("on_epoch_begin", None, 1, 1),
        ("on_train_begin", None, 1, 0),
    ):
        count = Count()
        mine = model()
        with Strategy():
            history = mine.fit(
                *(X, Y, 8, 3),
                shuffle=False,
                verbose=0,
                callbacks=[Stop(event, batch, rank), count],
            )
        reference = model()
        expected = reference.fit(
            *(X[: 8 * done], Y[: 8 * done], 8), shuffle=False, verbose=0
        )
        assert gather(count.batches) == [done, done], event
        assert_same_model(mine, reference)
        assert_same_history(history, expected)


@check
def stop_of_one_rank_without_a_callback_on_the_other():
    mine = model()
    mine.compile("sgd", "mse")
    callbacks = []
    if RANK == 1:
        nan = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: setattr(
                mine, "stop_training", batch == 2
            )
        )
        callbacks = [nan]
    with Strategy():
        mine.fit(X, Y, 4, 2, verbose=0, callbacks=callbacks)
    assert_equal_on_ranks(int(mine.optimizer.iterations))
    assert int(mine.optimizer.iterations) == 3


@check
def stop_of_evaluate_and_predict():
    mine = model()
    with Strategy():
        for call, event in (
            (lambda c: mine.evaluate(X, Y, 8, 0, callbacks=c), "test"),
            (lambda c: mine.predict(X, 8, 0, callbacks=c), "predict"),
        ):
            count = Count()
            result = call([Stop(f"on_{event}_batch_end", 1, 1), count])
            assert gather(count.batches) == [2, 2], event
            assert_equal_on_ranks(np.asarray(result).tobytes())
        # The validation of fit, of which the next epoch has to know nothing.
        count = Count()
        stop = Stop("on_test_batch_end", 0, 1)
        data = {"validation_data": (X, Y), "validation_batch_size": 8}
        mine.fit(X, Y, 8, 2, verbose=0, callbacks=[stop, count], **data)
    assert len(set(gather(count.batches))) == 1


@check
def what_differs_between_ranks_is_named():
    for calls, words in (
        (
            (lambda m: m.fit(X, Y, verbose=0), lambda m: m.predict(X)),
            ("rank 0 is at the beginning of fit", "rank 1", "of predict"),
        ),
        (
            [lambda m, n=n: m.fit(X, Y, epochs=n, verbose=0) for n in (1, 2)],
            ("another epochs", "rank 0: 1", "rank 1: 2"),
        ),
        (
            [
                lambda m, loss=loss: (
                    m.compile("sgd", loss),
                    m.fit(X, Y, verbose=0),
                )
                for loss in ("mse", "mae")
            ],
            ("another loss", "rank 0: 'mse'", "rank 1: 'mae'"),
        ),
        (
            [
                lambda m, o=o: (m.compile(o, "mse"), m.fit(X, Y, verbose=0))
                for o in map(
                    keras.optimizers.SGD,
                    (
                        keras.optimizers.schedules.CosineDecay(0.1, 10),
                        keras.optimizers.schedules.CosineDecay(0.1, 20),
                    ),
                )
            ],
            ("another schedule of learning rates",),
        ),
        (
            [
                lambda m, o=o: (m.compile(o, "mse"), m.fit(X, Y, verbose=0))
                for o in (
                    keras.optimizers.SGD(momentum=0.5),
                    keras.optimizers.SGD(momentum=0.25),
                )
            ],
            ("another momentum of the optimizer", "rank 1: 0.25"),
        ),
        (
            [lambda m, n=n: m.fit(X + n, Y, verbose=0) for n in range(2)],
            ("rank 1 has other examples than rank 0",),
        ),
    ):
        mine = model()
        with refused(*words), Strategy():
            calls[RANK](mine)


@check
def learning_rates_of_rank_0_are_warned_of():
    mine, reference = model(), model()
    mine.compile(keras.optimizers.SGD(0.01 * (RANK + 1)), "mse")
    with Strategy(), Messages() as messages:
        mine.fit(X, Y, shuffle=False, verbose=0)
    assert messages.have("different learning rates") == (RANK == 0)
    reference.compile(keras.optimizers.SGD(0.01), "mse")
    reference.fit(X, Y, shuffle=False, verbose=0)
    assert_same_model(mine, reference)


@check
def a_signal_to_one_rank_ends_all_behind_the_same_batch():
    def train(*callbacks, folder=FOLDER / "backup"):
        mine = model()
        callbacks = [*callbacks, kt.Backup(folder)]
        with Strategy():
            history = mine.fit(X, Y, 8, 2, 0, callbacks=callbacks)
        return mine, history

    def send(batch, logs):
        if batch == 3 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    signals = keras.callbacks.LambdaCallback(on_train_batch_end=send)
    try:
        train(signals)
    except SystemExit as ended:
        assert_equal_on_ranks(ended.code)
        assert ended.code == 75
    else:
        raise AssertionError("it trained to the end")
    assert gather((FOLDER / "backup" / "backup.npz").exists())[0]
    resumed = train()
    gather("rank 0 has removed it")
    assert not (FOLDER / "backup" / "backup.npz").exists()
    undisturbed = train(folder=FOLDER / "another")
    assert_same_model(resumed[0], undisturbed[0])
    assert_same_history(resumed[1], undisturbed[1])
