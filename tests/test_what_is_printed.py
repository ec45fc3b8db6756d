"""What a program reads besides its own output: as in plain Keras, plus a line.

Most run in a fresh process, whose C++ code writes what it always writes.
"""

import gc

import pytest

from keras_towers.foundation import notices
from tests.kit.scripts import ROOT, run_python

pytestmark = pytest.mark.alternate

SCRIPT = """
import contextlib, sys, threading, traceback
import keras
import numpy as np
import tensorflow as tf
import keras_towers as kt

kt.virtual_towers(2)
x = np.random.default_rng(0).random((50, 4), "float32")
y = x.sum(1, keepdims=True)


def model(*layers, **options):
    first = [keras.layers.Dense(3), keras.layers.Dropout(0.5)]
    made = keras.Sequential([*first, *layers])
    made.compile("adam", "mse", **options)
    return made


def ordinary():
    it = model(keras.layers.Dense(1))
    it.fit(x, y, epochs=2, validation_split=0.2, verbose=0)
    it.predict(x, verbose=0)
    it.train_on_batch(x, y)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(25)
    it.fit(data, verbose=0, shuffle=False)
    it.save(f"{sys.argv[1]}/model.keras")
    it.save_weights(f"{sys.argv[1]}/model.weights.h5")
    eager = model(keras.layers.Dense(1), run_eagerly=True)
    eager.fit(x, y, epochs=2, validation_split=0.2, verbose=0)


class Broken(keras.layers.Layer):
    def call(self, inputs):
        return self.nothing(inputs)


def broken():
    for eager in (False, True):
        try:
            model(Broken(), run_eagerly=eager).fit(x, y, verbose=0)
        except Exception:
            traceback.print_exc()


outside = model(keras.layers.Dense(1))


def threads():
    for _ in range(2):
        arguments = (x, y, 25, 1, 0)
        thread = threading.Thread(None, outside.fit, "other", arguments)
        thread.start()
        thread.join()


for case in sys.argv[2:]:
    for form in (contextlib.nullcontext, kt.TowerStrategy):
        print("=====", file=sys.stderr, flush=True)
        with form():
            globals()[case]()
"""
HEAD = "TowerStrategy: 2 towers (/device:CPU:0 to /device:CPU:1)"
CASES = ("ordinary", "broken", "threads")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """By case, what plain Keras and towers write to standard error."""
    folder = str(tmp_path_factory.mktemp("written"))
    ended = run_python("-c", SCRIPT, folder, *CASES, TF_CPP_MIN_LOG_LEVEL="0")
    assert ended.returncode == 0, ended.stderr[-3000:]
    _, *parts = (part.splitlines() for part in ended.stderr.split("=====\n"))
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return dict(zip(CASES, pairs, strict=True))


@pytest.mark.alternate(turn=0)
def test_an_ordinary_program_prints_one_line_more(lines):
    plain, towers = lines["ordinary"]
    assert towers[0] == HEAD
    # TensorFlow itself says some things once in a process.
    more = [line for line in towers[1:] if line not in plain]
    # One of its two models runs eagerly, as on one device.
    told = [line for line in more if "eager" in line]
    assert len(told) == len(set(told)) == 1
    assert more == told


@pytest.mark.alternate(turn=0)
def test_a_traceback_is_as_long_as_in_plain_keras(lines):
    plain, towers = (
        [
            [line for line in trace.splitlines() if line.startswith("  File")]
            for trace in "\n".join(written).split("Traceback")[1:]
        ]
        for written in lines["broken"]
    )
    (graph, eager), wanted = towers, plain
    assert graph == wanted[0]
    assert any(frame.endswith("in call") for frame in graph)
    # A Sequential whose build failed cannot be called with another batch.
    assert len(eager) <= len(wanted[1])
    package = str(ROOT / "keras_towers")
    assert not any(f'"{package}/' in frame for frame in eager)


@pytest.mark.alternate(turn=0)
def test_a_call_in_another_thread_is_warned_of_once(lines):
    plain, towers = lines["threads"]
    (said,) = [line for line in towers if "'other'" in line]
    assert "one device" in said and "MainThread" in said
    assert not [line for line in plain if "'other'" in line]


def test_a_notice_is_said_once_of_each_object_and_then_forgotten():
    """A second job of a notebook may have a model of the same name."""

    class Model:
        pass

    kept, first = len(notices._said), Model()
    assert notices.first_time(first, "idle")
    assert not notices.first_time(first, "idle")
    assert notices.first_time(first, "eager")
    second = Model()
    assert notices.first_time(second, "idle")
    del first, second
    gc.collect()
    assert len(notices._said) <= kept


NOTEBOOK = """
import logging, sys
import keras
import numpy as np
import tensorflow as tf
import keras_towers as kt

kt.virtual_towers(2)
x, y = np.ones((4, 2)), np.ones((4, 1))
# As TensorFlow sets it up where it is imported in an interactive session.
tf.get_logger().setLevel("INFO")
tf.get_logger().handlers[0].setStream(sys.stdout)
tf.get_logger().info("it logs")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", lambda y, found: found.nothing)
for eager in (False, True):
    model.run_eagerly = eager
    with kt.TowerStrategy():
        try:
            model.fit(x, y, verbose=0)
        except AttributeError as error:
            print("got", str(error)[-22:])
tf.get_logger().info("it still logs")

ours = logging.getLogger("keras_towers")
root = logging.getLogger()
for set_up in (
    lambda: None,
    # Sets up a handler, as Model.export does.
    lambda: logging.warning("a line"),
    lambda: root.setLevel("INFO") or root.handlers[0].setLevel("WARNING"),
    lambda: root.setLevel("ERROR"),
    lambda: root.setLevel("WARNING") or logging.disable(),
    lambda: logging.disable("NOTSET") or ours.setLevel("WARNING"),
    lambda: (
        ours.setLevel("NOTSET"),
        logging.basicConfig(
            level="INFO", format="logged %(message)s", force=True
        ),
    ),
):
    set_up()
    print("=====", file=sys.stderr)
    with kt.TowerStrategy():
        pass
"""


@pytest.fixture(scope="module")
def notebook():
    ended = run_python("-c", NOTEBOOK)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines(), [
        part.splitlines() for part in ended.stderr.split("=====\n")
    ]


@pytest.mark.alternate(turn=3)
def test_a_notebook_shows_an_error_once(notebook):
    first, *errors, last = notebook[0][:4]
    assert "it logs" in first
    assert "it still logs" in last
    assert errors == ["got no attribute 'nothing'"] * 2


@pytest.mark.alternate(turn=3)
def test_logging_that_a_program_set_up_is_respected(notebook):
    _, *parts = notebook[1]
    *shown, logged = [[line for line in part if HEAD in line] for part in parts]
    assert shown == [[HEAD]] * 3 + [[]] * 3
    assert logged == [f"logged {HEAD}"]
