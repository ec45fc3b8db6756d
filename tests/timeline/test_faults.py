"""Fits that fail, files that cannot be written, and what is refused."""

import logging
import shutil

import keras
import pytest

import keras_towers as kt
from keras_towers import compat
from keras_towers.fit.context import marks
from tests.kit.traces import written
from tests.kit.training import STEPS, X, Y, fit, linear


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def test_fits_after_one_that_was_interrupted(path, monkeypatch):
    finish, marked = marks.StepMarks.finish, []
    monkeypatch.setattr(
        marks.StepMarks, "finish", lambda of: marked.append(finish(of))
    )
    model, timeline = linear(), kt.Timeline(path)
    with kt.TowerStrategy(2):
        with pytest.raises(KeyboardInterrupt):
            fit(model, callbacks=[timeline, Fails()])
        # What there is has been written.
        assert len(written(path)["compute"]) == 3 * 2
        traces = len(marked)
        assert traces > 0
        fit(model)
        model.evaluate(X, Y, verbose=0)
        assert len(marked) == traces, "a fit without Timeline has marks"
        fit(model, callbacks=[timeline])
    assert len(marked) > traces
    assert len(written(path)["compute"]) == STEPS * 2


def test_a_folder_that_is_gone_loses_no_history(tmp_path, caplog, capsys):
    path = tmp_path / "folder" / "trace.json"
    timeline = kt.Timeline(path)
    removes = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: shutil.rmtree(path.parent)
    )
    with kt.TowerStrategy(2):
        history = fit(linear(), callbacks=[timeline, removes])
    assert len(history["loss"]) == 1
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(path) in record.getMessage()
    assert "No such file" in record.getMessage()
    assert timeline.phases["compute"] > 0
    assert "compute" in capsys.readouterr().out


def fitted(*callbacks):
    with kt.TowerStrategy(2):
        fit(linear(), callbacks=callbacks)


def called(method, path):
    with kt.TowerStrategy(2):
        getattr(linear(), method)(X, verbose=0, callbacks=[kt.Timeline(path)])


REFUSED = {
    "no path": (lambda p: kt.Timeline(None), "give a path"),
    "no step": (lambda p: kt.Timeline(p, steps=0), "steps=0"),
    "a folder": (lambda p: fitted(kt.Timeline(p.parent)), "cannot write"),
    "no name": (lambda p: fitted(kt.Timeline("a\0b")), "cannot write"),
    "two": (lambda p: fitted(kt.Timeline(p), kt.Timeline(p)), "give one"),
    "wrapped": (lambda p: fitted(kt.ChiefOnly(kt.Timeline(p))), "without Chi"),
    "evaluate": (lambda p: called("evaluate", p), "not evaluate"),
    "predict": (lambda p: called("predict", p), "not predict"),
    "no strategy": (
        lambda p: fit(linear(), callbacks=[kt.Timeline(p)]),
        "inside a strategy's block",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(path, name):
    act, message = REFUSED[name]
    with pytest.raises(kt.TowerError, match=message):
        act(path)
    assert not path.exists()


def test_determinism_forbids_the_clock(path, monkeypatch):
    monkeypatch.setattr(compat, "is_op_determinism_enabled", lambda: True)
    with pytest.raises(kt.TowerError, match="enable_op_determinism"):
        fitted(kt.Timeline(path))
