"""Fits that fail, files that cannot be written, and what is refused."""

import errno
import logging
import shutil

import keras
import pytest

import keras_towers as kt
from keras_towers.timeline import trace
from tests.kit.traces import written
from tests.kit.training import STEPS, X, Y, classifier, fit


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def test_an_interrupted_fit_writes_what_there_is(path):
    model, timeline = classifier(), kt.Timeline(path)
    with kt.TowerStrategy(4):
        with pytest.raises(KeyboardInterrupt):
            fit(model, callbacks=[timeline, Fails()])
        assert len(written(path)["compute"]) == 3 * 4
        # And it can be used again.
        fit(model, callbacks=[timeline])
    assert len(written(path)["compute"]) == STEPS * 4


class Removes(keras.callbacks.Callback):
    """Removes the folder that the trace is written to."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_end(self, logs=None):
        shutil.rmtree(self.folder)


def test_a_folder_that_is_gone_loses_no_history(tmp_path, caplog, capsys):
    path = tmp_path / "folder" / "trace.json"
    timeline = kt.Timeline(path)
    with kt.TowerStrategy(4):
        history = fit(classifier(), callbacks=[timeline, Removes(path.parent)])
    assert len(history["loss"]) == 1
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(path) in record.getMessage()
    assert "No such file" in record.getMessage()
    assert timeline.phases["compute"] > 0
    assert "compute" in capsys.readouterr().out


def test_an_interrupted_fit_says_so_on_a_full_disk(path, monkeypatch, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trace, "write", full)
    with kt.TowerStrategy(4), pytest.raises(KeyboardInterrupt):
        fit(classifier(), callbacks=[kt.Timeline(path), Fails()])
    assert "No space left on device" in caplog.text


REFUSED = {
    "no step": (lambda p: kt.Timeline(p, steps=0), "steps=0"),
    "a folder": (lambda p: fitted(kt.Timeline(p.parent)), "cannot write"),
    "a long name": (lambda p: fitted(kt.Timeline("a" * 300)), "too long"),
    "no name": (lambda p: fitted(kt.Timeline("a\0b")), "cannot write"),
    "two": (lambda p: fitted(kt.Timeline(p), kt.Timeline(p)), "give one"),
    "wrapped": (
        lambda p: fitted(kt.ChiefOnly(kt.Timeline(p))),
        "without Chief",
    ),
    "evaluate": (
        lambda p: called("evaluate", X, Y, callbacks=[kt.Timeline(p)]),
        "not evaluate",
    ),
    "predict": (
        lambda p: called("predict", X, callbacks=[kt.Timeline(p)]),
        "not predict",
    ),
    "no strategy": (
        lambda p: fit(classifier(), callbacks=[kt.Timeline(p)]),
        "inside a strategy's block",
    ),
}


def fitted(*callbacks):
    with kt.TowerStrategy(4):
        fit(classifier(), callbacks=callbacks)


def called(method, *args, **kwargs):
    with kt.TowerStrategy(4):
        getattr(classifier(), method)(*args, verbose=0, **kwargs)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(path, name):
    act, message = REFUSED[name]
    with pytest.raises(kt.TowerError, match=message.replace("(", r"\(")):
        act(path)
    assert not path.exists()


def test_determinism_forbids_the_clock(path, monkeypatch):
    from keras_towers import compat

    monkeypatch.setattr(compat, "is_op_determinism_enabled", lambda: True)
    with pytest.raises(kt.TowerError, match="enable_op_determinism"):
        fitted(kt.Timeline(path))
