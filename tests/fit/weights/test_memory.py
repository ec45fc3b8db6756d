"""Models that are built, trained and dropped leave nothing behind."""

import contextlib
import gc
import json
import subprocess
import sys
import threading
import weakref

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, Y, fit, linear

BEFORE, CYCLES = 2, 2
# MB in each cycle: less than a model's weight, which has 20.
ALLOWED = 5
# M_MMAP_THRESHOLD of glibc's mallopt(3), which otherwise grows with what was
# freed and keeps weights in the heap, or gives them back, as it likes.
MMAP_THRESHOLD = -3

SCRIPT = f"""
import contextlib, ctypes, gc, json
ctypes.CDLL(None).mallopt({MMAP_THRESHOLD}, 2**20)
import keras_towers as kt
kt.virtual_towers(2)
import keras, numpy as np, psutil

x = np.zeros((4, 500), "float32")

def build():
    wide = keras.layers.Dense(10_000, use_bias=False)
    model = keras.Sequential([keras.Input((500,)), wide])
    model.compile(keras.optimizers.SGD(0.1), lambda y, z: z)
    return model

def cycle(block):
    model = build()
    with block:
        model.fit(x, x, batch_size=4, verbose=0)
    del model
    keras.utils.clear_session()
    gc.collect()
    # Pages of files (libraries) come and go as the machine likes.
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 2**20

def used(block):
    return [cycle(block()) for _ in range({BEFORE + CYCLES})]

blocks = used(lambda: kt.TowerStrategy(2))
with kt.TowerStrategy(2):
    one = used(contextlib.nullcontext)
print(json.dumps({{"blocks": blocks, "one block": one}}))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_stays_flat():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    for use, sizes in json.loads(ended.stdout).items():
        grown = sizes[-1] - sizes[BEFORE - 1]
        assert grown < ALLOWED * CYCLES, (use, [round(each) for each in sizes])


def _live_variables():
    gc.collect()
    kind = type(tf.Variable(0.0))
    return sum(type(item) is kind for item in gc.get_objects())


def test_no_threads_and_no_variables_are_left():
    model = linear()

    def blocks(number):
        for _ in range(number):
            with kt.TowerStrategy(2):
                model.train_on_batch(X[:8], Y[:8])
        return threading.active_count(), _live_variables()

    threads, variables = blocks(2)
    more_threads, more_variables = blocks(2)
    assert more_threads <= threads
    assert more_variables <= variables
    assert_ordinary(model)
    assert int(model.optimizer.iterations) == 4


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_on_towers_dies_with_its_last_reference(inside):
    with contextlib.ExitStack() as block:
        block.enter_context(kt.TowerStrategy(2))
        model = linear()
        held = (model, model.optimizer, model.weights[0].value)
        dropped = [weakref.ref(each) for each in held]
        fit(model)
        if not inside:
            block.close()
        del model, held
        keras.utils.clear_session()
        gc.collect()
        assert [reference() for reference in dropped] == [None] * 3
