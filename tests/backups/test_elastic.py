"""States of a job that starts again, and what ``fit`` goes on with.

Jobs of several processes are in ``tests/processes/test_elastic.py``.
"""

import functools
import os
import signal

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import commits
from tests.kit.compare import assert_all_close, assert_same_history
from tests.kit.leaving import Boom
from tests.kit.training import adam, stacked

pytestmark = pytest.mark.alternate

X = np.random.default_rng(0).random((24, 3), "float32")
Y = X.sum(1, keepdims=True)


build = stacked(
    lambda: [keras.layers.Dropout(0.5), keras.layers.Dense(1)],
    (3,),
    optimizer=adam,
    loss=keras.losses.MeanSquaredError,
    metrics=lambda: ["mae"],
)


def script(lost_after=None, seen=(), model=None, asynchronous=False):
    """Train for three epochs of four batches; what a script would do."""
    model = model or build()
    state = kt.elastic.State(model, best=9.0, starts=0)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(state.starts)])

    class Best(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if self.batches == lost_after:
                raise Boom

        def on_epoch_end(self, epoch, logs=None):
            state.best = min(state.best, logs["loss"])

    @kt.elastic.run
    def train(state):
        seen.append((state.starts, state.epoch, state.batch, state.best < 9))
        assert len(resets) == (state.starts > 0)
        state.starts += 1
        commit = kt.elastic.Commit(state, 3, asynchronous)
        with kt.TowerStrategy(2):
            return model.fit(
                X, Y, 6, epochs=3, verbose=0, callbacks=[Best(), commit]
            )

    return train(state), model


@pytest.fixture(scope="module")
def undisturbed():
    """The history and the model of a script that nothing disturbs."""
    return script(seen=[])


def assert_as(undisturbed, found):
    (history, model), (wanted, alone) = found, undisturbed
    assert_all_close(model.weights, alone.weights, 1e-6)
    assert_same_history(history.history, wanted.history, 1e-6)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_fit_goes_on_from_the_last_commit(
    undisturbed, starts_again, asynchronous
):
    """Also where steps go on while a commit is written."""
    options, seen = {"asynchronous": asynchronous}, []
    for lost_after in (6, 4):
        with pytest.raises(Boom):
            script(lost_after, seen, **options)
        starts_again()
    assert_as(undisturbed, script(None, seen, **options))
    # A commit that is being written need not be the last one.
    wanted = [(0, 0, 0, False), (1, 1, 0, True), (2, 1, 3, True)]
    assert asynchronous or seen == wanted
    # It has been trained to its end.
    starts_again()
    assert_as(undisturbed, script(None, seen))


def test_a_fit_that_has_ended_is_not_trained_on(starts_again, caplog):
    """Another callback has ended it, and taken earlier weights back."""

    def train():
        model = build()
        state = kt.elastic.State(model)
        # The first epoch is the best, whatever follows.
        stopping = keras.callbacks.EarlyStopping(
            "loss", patience=0, min_delta=9.0, restore_best_weights=True
        )
        with kt.TowerStrategy(2):
            history = model.fit(
                *(X, Y, 6),
                epochs=5,
                verbose=0,
                callbacks=[stopping, kt.elastic.Commit(state)],
            )
        return history, model

    first = train()
    starts_again()
    again = train()
    assert "starts afresh" not in caplog.text
    assert first[0].epoch == again[0].epoch == [0, 1]
    assert_as(first, again)


def test_of_two_commits_one_may_be_damaged(
    undisturbed, starts_again, tmp_path, caplog
):
    with pytest.raises(Boom):
        script(8, [])
    starts_again()
    *_, last = sorted(tmp_path.rglob("ckpt-*.data-*"))
    last.write_bytes(last.read_bytes()[:-1])
    seen = []
    assert_as(undisturbed, script(None, seen))
    # Of the objects, too.
    assert seen == [(1, 1, 0, True)]
    assert "is damaged (ckpt-3" in caplog.text
    starts_again()
    for notes in tmp_path.rglob("ckpt-*.json"):
        notes.write_bytes(notes.read_bytes()[:99])
    with pytest.raises(kt.TowerError, match="or damaged"):
        script(seen=[])


def test_after_an_error_no_commit_is_promised(starts_again, monkeypatch):
    reported = []
    monkeypatch.setattr(commits, "report_resumes", reported.append)

    @kt.elastic.run
    def fail(state):
        raise Boom

    with pytest.raises(Boom):
        fail(kt.elastic.ObjectState(step=0))
    assert reported == [True, False]


def count(limit, told=False):
    state = kt.elastic.ObjectState(step=0, names=["a"])

    @kt.elastic.run
    def train(state):
        while state.step < limit:
            state.step += 1
            state.names = [*state.names, str(state.step)]
            if told and state.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            state.commit()
        return state.step, state.names

    return train(state)


def test_objects_go_on_from_the_last_commit(starts_again):
    assert count(2) == (2, ["a", "1", "2"])
    starts_again()
    assert count(3) == (3, ["a", "1", "2", "3"])


def test_objects_go_on_from_the_commit_before_a_damaged_one(
    starts_again, tmp_path, caplog
):
    count(3)
    commits = sorted(tmp_path.rglob("commit-*"))
    assert [commit.name for commit in commits] == ["commit-2", "commit-3"]
    for commit in reversed(commits):
        starts_again()
        content = bytearray(commit.read_bytes())
        content[-9] ^= 1
        commit.write_bytes(content)
        if commit is commits[-1]:
            assert count(2) == (2, ["a", "1", "2"])
            assert "commit-3 is damaged: the one before" in caplog.text
    with pytest.raises(kt.TowerError, match="or is damaged"):
        count(2)


def test_a_commit_ends_a_process_that_is_told_to(starts_again):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        count(5, told=True)
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    starts_again()
    assert count(3) == (3, ["a", "1", "2", "3"])


def test_what_is_restored_is_what_was_saved_last():
    state = kt.elastic.ObjectState(step=1)
    state.step = 2
    state.restore()
    assert state.step == 1
    state.step = 3
    state.commit()
    state.step = 4
    state.restore()
    assert state.step == 3


@pytest.mark.parametrize("what", ["objects", "fit"])
def test_only_the_job_itself_is_believed(starts_again, monkeypatch, what):
    train = {"objects": lambda: count(2), "fit": lambda: script(seen=[])}[what]
    train()
    starts_again()
    monkeypatch.setenv(settings.ENV_SECRET, "of another job")
    with pytest.raises(kt.TowerError, match="was not written by this job"):
        train()


def test_a_script_alone_runs_as_it_is(tmp_path, monkeypatch):
    """Nothing starts it again, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert count(2) == (2, ["a", "1", "2"])
    seen = []
    script(seen=seen)
    assert seen == [(0, 0, 0, False)]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"epoch": 0}, "uses the name 'epoch' itself"),
        ({"restore": True}, "uses the name 'restore' itself"),
        ({"rate": lambda: 1}, "that can be pickled.*leave out functions"),
    ],
)
def test_objects_that_a_state_cannot_keep(objects, words):
    kind = kt.elastic.ObjectState
    if "epoch" in objects:
        kind = functools.partial(kt.elastic.State, build())
    with pytest.raises(kt.TowerError, match=words):
        kind(**objects).sync()


def test_a_commit_needs_the_state_of_its_model():
    with pytest.raises(kt.TowerError, match="takes a Keras model first, not a"):
        kt.elastic.State(best=1.0, model="mlp")
    with pytest.raises(kt.TowerError, match="State, not a ObjectState"):
        kt.elastic.Commit(kt.elastic.ObjectState())
    state, other = kt.elastic.State(build()), build()
    callbacks, words = [kt.elastic.Commit(state)], "has the state of model"
    with kt.TowerStrategy(1), pytest.raises(kt.TowerError, match=words):
        other.fit(X, Y, callbacks=callbacks, verbose=0)
