"""What a program reads besides its own output: as in plain Keras, plus a line.

Each case runs in a fresh process, whose C++ code writes what it always writes.
"""

import os
import re
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import contextlib, sys, traceback
import keras
import numpy as np
import tensorflow as tf
import keras_towers as kt

kt.virtual_towers(4)
x = np.random.default_rng(0).random((50, 4), "float32")
y = x.sum(1, keepdims=True)


def say(marker):
    sys.stdout.flush()
    print("=====", marker, file=sys.stderr, flush=True)


def model(*layers, **options):
    made = keras.Sequential(
        [keras.layers.Dense(3), keras.layers.Dropout(0.5), *layers]
    )
    made.compile("adam", "mse", **options)
    return made


class Broken(keras.layers.Layer):
    def call(self, inputs):
        return self.nothing(inputs)


def ordinary(folder):
    for eager in (False, True):
        it = model(keras.layers.Dense(1), run_eagerly=eager)
        it.fit(x, y, epochs=2, validation_split=0.2, verbose=0)
        it.evaluate(x, y, verbose=0)
        it.predict(x, verbose=0)
        it.train_on_batch(x, y)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        it.fit(data, verbose=0, shuffle=False)
    it.save(f"{folder}/model.keras")
    it.save_weights(f"{folder}/model.weights.h5")


def broken(folder):
    for eager in (False, True):
        try:
            model(Broken(), run_eagerly=eager).fit(x, y, verbose=0)
        except Exception:
            traceback.print_exc()


class Shows(keras.layers.Layer):
    def call(self, inputs):
        tf.print("shown", output_stream="file:///dev/null")
        return inputs


def asked_for_xla(folder):
    it = model(Shows(), keras.layers.Dense(1), jit_compile=True)
    with contextlib.suppress(tf.errors.OpError):
        it.fit(x, y, verbose=0)


def threads(folder):
    import threading

    for _ in range(2):
        thread = threading.Thread(
            name="other",
            target=made_outside.fit,
            args=(x, y),
            kwargs={"verbose": 0},
        )
        thread.start()
        thread.join()


def slowly(folder):
    import time

    class Slow(keras.layers.Layer):
        def call(self, inputs):
            if not keras.backend.is_keras_tensor(inputs):
                time.sleep(2.6)
            return inputs

    it = model(Slow(), keras.layers.Dense(1))
    it.build((None, 4))
    it.fit(x, y, verbose=0, epochs=2)


made_outside = model(keras.layers.Dense(1))
case = globals()[sys.argv[1]]
for name, block in (
    ("plain", contextlib.nullcontext),
    ("towers", lambda: kt.TowerStrategy(4)),
):
    say(name)
    with block():
        case(sys.argv[2])
"""
HEAD = "TowerStrategy: 4 towers (/device:CPU:0 to /device:CPU:3)"


def lines(case, folder, script=SCRIPT):
    """What both forms write to standard error, line by line."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "TF_CPP_MIN_LOG_LEVEL"
    }
    ended = subprocess.run(
        [sys.executable, str(path), case, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    _, plain, towers = re.split("===== (?:plain|towers)\n", ended.stderr)
    return plain.splitlines(), towers.splitlines()


def frames(lines):
    """The frames of every traceback."""
    found = []
    for line in lines:
        if line.startswith("Traceback"):
            found.append([])
        elif line.startswith("  File"):
            found[-1].append(line)
    return found


def test_an_ordinary_program(tmp_path):
    plain, towers = lines("ordinary", tmp_path)
    assert towers[0] == HEAD
    # TensorFlow itself says some things once in a process.
    more = [line for line in towers[1:] if line not in plain]
    # Each of its two models has a random layer, which is said once.
    told = [line for line in more if "does not train as on one" in line]
    assert len(told) == len(set(told)) == 2
    # On a machine that is busy, towers may take long to prepare.
    rest = [line for line in more if line not in told]
    assert not [line for line in rest if "preparing 4 towers" not in line]


def test_a_traceback_is_as_long_as_in_plain_keras(tmp_path):
    plain, towers = lines("broken", tmp_path)
    graph, eager = frames(towers)
    wanted = frames(plain)
    assert graph == wanted[0]
    assert any(frame.endswith("in call") for frame in graph)
    # A Sequential whose build failed cannot be called with another batch.
    assert len(eager) <= len(wanted[1])
    assert not any("keras_towers" in frame for frame in eager)
    reason = "'Broken' object has no attribute 'nothing'"
    assert sum(reason in line for line in towers) >= 2


NOTEBOOK = """
import sys
sys.ps1 = ">>> "  # TensorFlow then logs to standard output, also INFO
import keras
import numpy as np
import tensorflow as tf
import keras_towers as kt

kt.virtual_towers(2)
tf.get_logger().info("it logs")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", lambda y, found: found.nothing)
for eager in (False, True):
    model.run_eagerly = eager
    with kt.TowerStrategy(2):
        try:
            model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        except AttributeError as error:
            print("got", str(error)[-22:])
tf.get_logger().info("it still logs")
"""


def test_a_notebook_shows_an_error_once(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, *errors, last = ended.stdout.splitlines()
    assert "it logs" in first
    assert "it still logs" in last
    assert errors == ["got no attribute 'nothing'"] * 2


def test_xla_that_was_asked_for(tmp_path):
    _, towers = lines("asked_for_xla", tmp_path)
    (said,) = [line for line in towers if "jit_compile is off" in line]
    assert "PrintV2" in said


def test_a_call_in_another_thread_is_warned_of_once(tmp_path):
    plain, towers = lines("threads", tmp_path)
    (said,) = [line for line in towers if "'other'" in line]
    for part in ("fit of model", "one device", "TowerStrategy", "MainThread"):
        assert part in said
    assert not [line for line in plain if "'other'" in line]


@pytest.mark.long
def test_a_slow_first_step_is_announced_once(tmp_path):
    _, towers = lines("slowly", tmp_path)
    (said,) = [line for line in towers if "preparing" in line]
    assert re.search(r"preparing 4 towers .* took \d+ s", said)


ALONE = """
import sys
import keras
import numpy as np
import keras_towers as kt

print("===== plain", file=sys.stderr)
with kt.NoOpStrategy():
    pass
print("===== towers", file=sys.stderr)
for make in (kt.TowerStrategy, kt.ParameterServerTowerStrategy):
    with make() as strategy:
        pass
"""


def test_one_device_alone_is_warned_of(tmp_path):
    noop, towers = lines("", tmp_path, ALONE)
    assert noop == [
        "NoOpStrategy: epochs, steps and callbacks run; nothing is computed"
    ]
    assert len(towers) == 2
    for line in towers:
        assert "1 tower (/device:CPU:0)" in line
        assert "no other device" in line
        assert "virtual_towers" in line


QUIET = """
import logging, sys
import keras_towers as kt

kt.virtual_towers(2)
{set_up}
print("===== plain", file=sys.stderr)
print("===== towers", file=sys.stderr)
with kt.TowerStrategy():
    pass
"""


@pytest.mark.parametrize(
    ("set_up", "said"),
    [
        ("logging.getLogger('keras_towers').setLevel(logging.WARNING)", []),
        ("logging.basicConfig()", []),
        (
            "logging.basicConfig(level='INFO', format='%(message)s')",
            [HEAD.replace("4", "2").replace("3", "1")],
        ),
    ],
)
def test_the_logging_that_a_program_set_up(set_up, said, tmp_path):
    _, towers = lines("", tmp_path, QUIET.format(set_up=set_up))
    assert towers == said
