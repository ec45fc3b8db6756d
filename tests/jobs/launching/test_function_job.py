"""Functions as jobs: ``kt.launch``, in scripts, threads and notebooks."""

import os
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import nbclient
import nbformat
import numpy as np
import psutil
import pytest

import keras_towers as kt
from keras_towers.foundation import settings
from tests.jobs.launching import called
from tests.kit.compare import assert_close, assert_same_history, weights_of
from tests.kit.processes import all_gone, wait_until
from tests.kit.training import X, Y, classifier


@pytest.fixture(autouse=True)
def nothing_left():
    """Whatever happens, no process of a job is there afterwards."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert all_gone(list(left))


def fit(model):
    return model.fit(X, Y, batch_size=8, verbose=0).history["loss"]


def train(scale, built):
    # Sent with what it refers to.
    model = built()
    with kt.HorovodStrategy() as strategy:
        loss = fit(model)
    print("trained", flush=True)
    return model, loss, strategy.size * scale


@pytest.mark.alternate(turn=3)
def test_what_rank_0_returns_is_that_of_one_process(capsys):
    found, loss, number = kt.launch(
        train, np=2, args=(3,), kwargs={"built": classifier}
    )
    wanted = classifier()
    assert_close(loss, fit(wanted), 1e-5)
    assert_same_history(weights_of(found), weights_of(wanted))
    assert isinstance(found.optimizer, type(wanted.optimizer))
    assert number == 6
    out = capsys.readouterr().out.splitlines()
    assert {"[0] trained", "[1] trained"} <= set(out)


class Refused(keras.layers.Layer):
    """Is made again in ranks only."""

    def call(self, x):
        return x

    @classmethod
    def from_config(cls, config):
        assert "HOROVOD_RANK" in os.environ, "no rank"
        return cls(**config)


def own_layer(name):
    """A class that no other process can import, as one of a notebook."""

    class Twice(keras.layers.Layer):
        def call(self, x):
            return x * 2

    Twice.__name__ = name
    return Twice


def with_layers(*layers):
    made = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    made.compile("sgd", lambda y, found: (y - found) ** 2)
    return made


@pytest.mark.alternate(turn=3)
def test_models_of_own_classes_go_to_ranks_and_come_back():
    x, sent_class = np.ones((8, 4), "float32"), own_layer("Twice")

    def train(sent):
        assert type(sent.layers[0]) is sent_class
        model = with_layers(sent_class(), own_layer("Own")())
        model.fit(x, x[:, :1], verbose=0)
        return {"trained": model, "weights": model.get_weights()}

    result = kt.launch(train, np=1, args=(with_layers(sent_class()),))
    found = result["trained"]
    assert type(found.layers[0]) is sent_class
    assert type(found.layers[1]).__name__ == "Own"
    np.testing.assert_array_equal(found.get_weights()[0], result["weights"][0])
    assert found.evaluate(x, x[:, :1], verbose=0) > 0


@pytest.mark.alternate(turn=3)
@pytest.mark.parametrize("returns", ["a model", "a lock, too"])
def test_what_was_trained_is_kept_if_it_cannot_be_returned(returns):
    def train():
        model = with_layers(Refused())
        model.set_weights([np.full((4, 1), 7), np.full(1, 8)])
        return model if returns == "a model" else (threading.Lock(), model)

    with pytest.raises(kt.TowerError, match="be (un)?pickled") as error:
        kt.launch(train, np=1)
    (note,) = error.value.__notes__
    path = re.search(r"model.load_weights\(\) with '(.*)'$", note)[1]
    again = with_layers(Refused())
    again.load_weights(path)
    assert [w.max() for w in again.get_weights()] == [7, 8]
    shutil.rmtree(os.path.dirname(path))


def test_an_error_of_a_rank_is_raised_with_its_traceback(tmp_path, capsys):
    """Also in a thread, where no signal can be awaited."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(kt.launch, called.fail, output=tmp_path)
        with pytest.raises(kt.TowerError, match="an error on rank 1:") as found:
            job.result()
    assert "ValueError: bad data" in str(found.value)
    assert ", in fail\n" in str(found.value)
    assert "jobs/launching/function_job.py" not in str(found.value)
    said = capsys.readouterr().err
    assert "[1] ValueError: bad data" in said
    assert "kt.launch: rank 1 ended with exit code 1" in said
    assert "ValueError: bad data" in (tmp_path / "rank.1.txt").read_text()


def test_ctrl_c_ends_the_ranks(tmp_path):
    def interrupt():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(interrupt)
        kt.launch(called.wait, args=(tmp_path,))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unpicklable", "returned a lock, which cannot be pickled"),
        ("killed", "was killed by SIGKILL"),
        ("early", "rank 0 ended before the function returned"),
        ("exit", "SystemExit: enough"),
    ],
)
def test_other_ends(how, said):
    with pytest.raises(kt.TowerError, match=said):
        kt.launch(called.end, np=1, args=(how,))


def test_what_cannot_start(monkeypatch):
    with pytest.raises(kt.TowerError, match="np=0: give 1 or more"):
        kt.launch(print, np=0)
    with pytest.raises(kt.TowerError, match="np='2': give 1 or more"):
        kt.launch(print, np="2")
    with pytest.raises(kt.TowerError, match="takes a function, but got 2"):
        kt.launch(2)
    lock = threading.Lock()
    with pytest.raises(kt.TowerError, match="<lambda> cannot be sent.*lock"):
        kt.launch(lambda: lock)
    monkeypatch.setenv(settings.ENV_STORE, "127.0.0.1:1")
    monkeypatch.setenv(settings.ENV_SECRET, "secret")
    with pytest.raises(kt.TowerError, match="is itself a rank of a job"):
        kt.launch(print)


CELLS = (
    """
import os, sys, keras_towers as kt
class Answer:
    pass
offset = 40
def ask(number):
    print("rank", os.environ["HOROVOD_RANK"], "Größe ✓")
    print("to stderr", file=sys.stderr)
    answer = Answer()
    answer.value = offset + number
    return answer
answer = kt.launch(ask, np=2, args=(2,))
print(type(answer) is Answer, answer.value)
""",
    """
print("first")
kt.launch(ask, np=1, args=(0,)).value
""",
)


def test_a_notebook(tmp_path, monkeypatch):
    # A kernel is one of IPython: tests/kit/lean.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=100,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    said = [
        "".join(o["text"] for o in cell.outputs if o.get("name") == name)
        for cell in cells
        for name in ("stdout", "stderr")
    ]
    assert [sorted(text.splitlines()) for text in said[:2]] == [
        ["True 42", "[0] rank 0 Größe ✓", "[1] rank 1 Größe ✓"],
        ["[0] to stderr", "[1] to stderr", said[1].splitlines()[-1]],
    ]
    assert said[2] == "first\nrank 0 Größe ✓\n"
    assert cells[1].outputs[-1]["data"]["text/plain"] == "40"
