"""Checks of a worker: what callbacks write, restore, and stop on two ranks."""

import os
import pathlib
import signal
import sys

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.calls.callback_roles import ALL_EVENTS
from tests.kit.again import begin_again
from tests.kit.compare import (
    assert_all_close,
    assert_close,
    assert_same_history,
)
from tests.kit.ranks import check
from tests.kit.traces import read_trace
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1])


class Count(keras.callbacks.Callback):
    """Counts the batches and the epochs."""

    batches = epochs = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


class Saves(keras.callbacks.ModelCheckpoint):
    saves = 0

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.saves += 1


@check
def files_of_all_ranks_are_written_by_one_and_others_by_their_rank():
    mine, chief, every = s.eager(), Count(), Count()
    of_all = Saves(FOLDER / "of-all.keras")
    own_log = keras.callbacks.CSVLogger(FOLDER / f"log-{s.RANK}.csv")
    shared = FOLDER / f"seen-by-{s.RANK}"
    shared.mkdir()
    with s.Strategy():
        s.fit(
            mine,
            batch_size=s.COUNT,
            epochs=2,
            callbacks=[
                keras.callbacks.ModelCheckpoint(shared / "model.keras"),
                keras.callbacks.CSVLogger(shared / "log.csv"),
                keras.callbacks.TensorBoard(shared / "board"),
                keras.callbacks.BackupAndRestore(
                    shared / "backup", delete_checkpoint=False
                ),
                keras.callbacks.CallbackList([kt.ChiefOnly(chief)], model=mine),
                every,
                of_all,
                kt.ChiefOnly(Saves(shared / "of-chief.keras")),
                kt.EveryRank(own_log),
            ],
        )
        # Or all of them in a list of Keras.
        listed = keras.callbacks.CallbackList(
            [
                keras.callbacks.ModelCheckpoint(shared / "listed.keras"),
                kt.ChiefOnly(chief),
                every,
            ],
            add_history=True,
            model=mine,
        )
        given = list(listed.callbacks)
        s.fit(mine, batch_size=s.COUNT, callbacks=listed)
    assert listed.callbacks == given
    written = sorted(path.name for path in shared.iterdir())
    wanted = ["listed.keras", "log.csv", "model.keras"]
    if s.RANK == 0:
        wanted = sorted(["backup", "board", "of-chief.keras", *wanted])
    assert written == wanted
    keras.models.load_model(shared / "model.keras")
    assert of_all.saves == (0 if s.RANK else 2)
    assert (chief.epochs, every.epochs) == (0 if s.RANK else 3, 3)
    assert (FOLDER / f"log-{s.RANK}.csv").read_text().count("\n") == 3
    s.gather("all have written")
    saved = keras.models.load_model(FOLDER / "seen-by-0" / "listed.keras")
    assert_all_close(saved.get_weights(), mine.get_weights(), 0)


def writes(factor=0.5):
    """A callback that writes all weights, and the rate, at every event."""

    def write(model):
        for variable in model.trainable_variables:
            variable.assign(factor * variable)
        model.optimizer.learning_rate = 0.9 * model.optimizer.learning_rate

    events = [e for e in ALL_EVENTS if not e.startswith("on_batch")]
    return s.Does(**dict.fromkeys(events, write))


def trained_with(*callbacks, on=0, make=s.eager, **options):
    """Ranks of which one has the callbacks train as one process with them."""
    options = {"batch_size": 25, "epochs": 2, **options}

    def train(callbacks):
        return lambda it: s.fit(it, callbacks=callbacks, **options)

    s.assert_as_one_process(
        make(),
        train([c() for c in callbacks] if on == s.RANK else []),
        alone=make() if s.RANK == 0 else None,
        reference=lambda it: train([c() for c in callbacks])(it),
    )


@check
def what_callbacks_of_one_rank_write_reaches_all():
    validated = {"validation_data": (s.X, s.Y), "validation_batch_size": 25}
    for rank in range(2):
        trained_with(writes, on=rank, **validated)

    def averaging():
        rule = keras.optimizers.SGD(0.1, 0.9, use_ema=True, ema_momentum=0.5)
        return s.eager(optimizer=rule)

    swaps = keras.callbacks.SwapEMAWeights
    options = {"mode": "max", "restore_best_weights": True}

    def restores():
        # Each epoch is worse than the first one.
        return keras.callbacks.EarlyStopping("loss", **options)

    trained_with(restores, lambda: swaps(swap_on_epoch=True), make=averaging)
    trained_with(swaps, make=averaging, **validated)


@check
def what_a_callback_writes_is_there_for_the_next_one():
    mine, seen = s.eager(), []

    def evaluate(model):
        seen.append(model.evaluate(s.X, s.Y, verbose=0))

    chief = kt.ChiefOnly(s.Does(on_epoch_end=lambda it: it.set_weights(zeros)))
    zeros = [np.zeros_like(weight) for weight in mine.get_weights()]
    with s.Strategy():
        s.fit(mine, callbacks=[chief, s.Does(on_epoch_end=evaluate)])
    s.assert_equal_on_ranks(seen)
    assert_close(seen[0][0], np.mean(s.Y**2), 1e-5)


@check
def ranks_that_write_other_values_are_told():
    """Also where the value of rank 0 is the one that is there."""
    mine = s.eager()
    rate = float(mine.optimizer.learning_rate)
    own = keras.callbacks.LearningRateScheduler(lambda epoch: rate + s.RANK)
    with s.Messages() as messages, s.Strategy():
        s.fit(mine, callbacks=[own], epochs=2)
    assert float(mine.optimizer.learning_rate) == rate
    words = "different values into sgd/learning_rate (rank 0: LearningRateSched"
    assert messages.have(words) == (s.RANK == 0), messages.texts


class Reports(keras.callbacks.Callback):
    """Evaluates and predicts within ``fit`` on some ranks; then all write."""

    def __init__(self, *ranks):
        super().__init__()
        self.here, self.seen, self.functions = s.RANK in ranks, [], set()

    def on_train_begin(self, logs=None):
        # It shares its weights with the model that trains.
        self.part = keras.Model(self.model.inputs, self.model.layers[0].output)

    def on_train_batch_end(self, batch, logs=None):
        if self.here and batch == 0:
            # What this leaves in the metrics counts in the logs that follow.
            self.seen += self.model.evaluate(s.X[:7], s.Y[:7], verbose=0)

    def on_epoch_end(self, epoch, logs=None):
        if self.here:
            self.seen += [
                *self.model.evaluate(s.X, s.Y, 20, verbose=0),
                self.model.predict(s.X, 20, verbose=0),
                self.model.predict_on_batch(s.X[:3]),
                self.part.predict(s.X, verbose=0),
            ]
            function = self.model.predict_function
            self.functions.add(getattr(function, "alone", None))
        for variable in self.model.trainable_variables:
            variable.assign(0.9 * variable)


@check
def calls_in_callbacks_of_some_ranks_run_there_alone():
    validated = {"validation_data": (s.X, s.Y), "validation_batch_size": 20}
    options = {"batch_size": 20, "epochs": 2, **validated}
    alone, wanted, history = s.model(), Reports(0), {}
    if s.RANK == 0:
        history = s.fit(alone, callbacks=[wanted], **options).history
    for on, given in (
        # Only a rank has the callback, or all have it and only some act.
        ([0], lambda report: [kt.ChiefOnly(report)]),
        ([1], lambda report: [report]),
        ([0, 1], lambda report: [report]),
    ):
        mine, report = s.model(), Reports(*on)
        with s.Strategy():
            found = s.fit(mine, callbacks=given(report), **options).history
        s.assert_same_model(mine, alone)
        s.assert_equal_on_ranks(found)
        # Traced once, for all epochs.
        assert len(report.functions) == (s.RANK in on)
        assert (None in report.functions) == (on == [0, 1])
        seen = s.gather([np.asarray(value).tolist() for value in report.seen])
        if s.RANK == 0:
            assert_same_history(found, history)
            for rank in on:
                assert len(seen[rank]) == len(wanted.seen)
                assert_all_close(seen[rank], wanted.seen)


def only_on_rank_1(event, does, **options):
    """What the ranks call: a ``fit`` in whose callback only rank 1 acts."""
    acts = s.Does(**{event: lambda it: does(it) if s.RANK else None})
    return lambda mine: s.fit(mine, callbacks=[acts], **options)


@check
def calls_that_some_ranks_cannot_make_alone_are_refused_on_all():
    def evaluate(mine):
        mine.evaluate(s.X, s.Y, verbose=0)

    def predict(mine):
        acts = s.Does(on_predict_end=lambda it: evaluate(it) if s.RANK else 0)
        mine.predict(s.X, verbose=0, callbacks=[acts])

    def in_other_batches(mine):
        mine.evaluate(s.X, s.Y, 20 + s.RANK, verbose=0)

    def fit(mine):
        s.fit(mine, callbacks=[s.Does(on_epoch_end=in_other_batches)])

    for make, act, options, *words in (
        (
            *(s.eager, only_on_rank_1("on_epoch_end", s.fit), {}),
            "rank 0 does not; rank 1 calls fit of model 'sequential' in "
            "Does.on_epoch_end, but fit needs all ranks. Call it on every",
        ),
        (
            *(s.model, only_on_rank_1("on_train_batch_end", evaluate)),
            {"sync_every": 8},
            "but with sync_every, ranks have the same weights only at the end",
        ),
        (
            *(s.eager, predict, {}),
            "'sequential' is not built for evaluate yet. Call evaluate on",
        ),
        (
            *(s.eager, fit, {}),
            "evaluate of model 'sequential' has different settings",
            "batch_size (rank 0: 20, rank 1: 21)",
        ),
    ):
        mine = make()
        with s.refused(*words), s.Strategy(**options):
            act(mine)
    # From the end of an epoch to the next step it is exact.
    mine, seen = s.model(), []

    def look(it):
        if s.RANK:
            seen.append(it.evaluate(s.X, s.Y, verbose=0))

    looks = s.Does(
        on_epoch_begin=lambda it: look(it) if seen else None, on_epoch_end=look
    )
    with s.Strategy(sync_every=8):
        s.fit(mine, callbacks=[looks], epochs=2)
        end, begin, last = s.gather(seen)[1]
        assert_close(begin, end, 1e-9)
        assert_close(last, mine.evaluate(s.X, s.Y, verbose=0), 2e-6)


class Stop(keras.callbacks.Callback):
    """Stops a loop at one of its events."""

    def __init__(self, event, number=None):
        super().__init__()
        loops = {"test": "stop_evaluating", "predict": "stop_predicting"}
        attribute = loops.get(event.split("_")[1], "stop_training")

        def stop(at=None, logs=None):
            if number in (None, at):
                setattr(self.model, attribute, True)

        setattr(self, event, stop)


@check
def stop_of_one_rank():
    mine, alone = s.eager(), s.eager()
    total = 0
    # On either rank, around a batch or an epoch, or before all of them.
    for event, number, done, rank in (
        ("on_train_batch_begin", 1, 2, 0),
        ("on_epoch_begin", None, 1, 1),
        ("on_train_begin", None, 1, 0),
        ("on_epoch_end", 0, 3, 1),
        ("on_train_batch_end", 1, 2, 1),
    ):
        # The other one may have no callback at all.
        count = Count()
        callbacks = [Stop(event, number), count] if rank == s.RANK else []
        if event == "on_train_batch_end":
            # Where none acts behind a batch, Keras calls them in a thread.
            callbacks = keras.callbacks.CallbackList(
                callbacks, add_history=True, model=mine
            )
        with s.Strategy():
            found = s.fit(mine, batch_size=20, epochs=3, callbacks=callbacks)
        assert found.epoch == [0], event
        assert rank != s.RANK or count.batches == done, event
        total += done
        assert s.gather(int(mine.optimizer.iterations)) == [total] * 2, event
        if s.RANK == 0:
            rows = slice(20 * done)
            wanted = s.fit(alone, s.X[rows], s.Y[rows], batch_size=20)
            assert_same_history(found.history, wanted.history)
    s.assert_same_model(mine, alone)


@check
def stop_of_evaluate_and_predict():
    mine = s.eager()

    def fit(callbacks):
        # The next epoch has to know nothing of what its validation does.
        validated = {"validation_data": (s.X, s.Y), "validation_batch_size": 8}
        s.fit(mine, batch_size=25, epochs=2, callbacks=callbacks, **validated)
        return 0

    for call, event, number, batches in (
        (lambda c: mine.evaluate(s.X, s.Y, 8, 0, callbacks=c), "test", 1, 2),
        (lambda c: mine.predict(s.X, 8, 0, callbacks=c), "predict", 1, 2),
        (fit, "test", 0, 2 * (2 + 1)),
    ):
        count = Count()
        stop = [Stop(f"on_{event}_batch_end", number)] if s.RANK else []
        with s.Strategy():
            result = call([*stop, count])
        assert s.gather(count.batches) == [batches] * 2, event
        s.assert_equal_on_ranks(np.asarray(result).tobytes())


@check
def a_signal_to_one_rank_ends_all_behind_the_same_batch():
    def train(mine, *callbacks):
        callbacks = [*callbacks, kt.Backup(FOLDER / "signalled")]
        return s.fit(mine, batch_size=20, epochs=2, callbacks=callbacks)

    def send(batch, logs):
        if batch == 1 and s.RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    signals = keras.callbacks.LambdaCallback(on_train_batch_end=send)
    with pytest.raises(SystemExit) as ended, s.Strategy():
        train(s.eager(), signals)
    assert s.gather(ended.value.code) == [75, 75]
    begin_again()
    kept = FOLDER / "signalled" / "backup"
    assert s.gather(kept.exists())[0]
    s.assert_as_one_process(
        s.eager(),
        train,
        reference=lambda it: s.fit(it, batch_size=20, epochs=2),
    )
    assert not kept.exists()


@check
def a_call_that_fails_on_one_rank_counts_on_all():
    def train(mine, *callbacks):
        last = kt.Backup(FOLDER / "failed")
        return s.fit(mine, epochs=2, callbacks=[last, *callbacks])

    def fail(mine):
        if s.RANK == 1:
            raise s.Boom

    with pytest.raises((s.Boom, kt.TowerError)), s.Strategy():
        train(s.eager(), s.Does(on_epoch_end=fail))
    begin_again()
    # The others hear of it, before anything is written.
    with s.refused("backup of another model", "loss ('mse'"), s.Strategy():
        train(s.eager(loss="mae"))
    s.assert_as_one_process(
        s.eager(),
        train,
        reference=lambda it: s.fit(it, epochs=2),
    )


@check
def timeline_of_all_ranks():
    path = FOLDER / "trace.json"
    timeline = kt.Timeline(path)
    s.assert_as_one_process(
        s.model(),
        lambda it: s.fit(it, batch_size=20, epochs=2, callbacks=[timeline]),
        reference=lambda it: s.fit(it, batch_size=20, epochs=2),
    )
    # One file has the steps of both ranks, on one clock.
    found = read_trace(path)
    wanted = [(step, rank) for step in range(2 * 3) for rank in range(2)]
    for name in ("compute", "update", "reduction"):
        begins = {(e["args"]["step"], e["pid"]): e["ts"] for e in found[name]}
        assert sorted(begins) == wanted and len(found[name]) == len(wanted)
    for step, rank in wanted:
        apart = abs(begins[step, rank] - begins[step, 0])
        assert apart < 0.2, "it begins with the last rank"
    assert {event["pid"] for event in found["input"]} == {0, 1}
    assert bool(timeline.phases) == (s.RANK == 0)
    assert not path.with_name("trace.rank1.json").exists()


@check
def timeline_of_a_fit_that_fails():
    class Fails(kt.Timeline):
        def on_train_end(self, logs=None):
            raise RuntimeError

    path = FOLDER / "failed.json"
    with s.Strategy(), pytest.raises(RuntimeError):
        s.fit(s.model(), batch_size=s.COUNT, callbacks=[Fails(path)])
    own = path if s.RANK == 0 else path.with_name("failed.rank1.json")
    (computed, *_) = read_trace(own)["compute"]
    assert computed["pid"] == s.RANK
    s.gather("read")
