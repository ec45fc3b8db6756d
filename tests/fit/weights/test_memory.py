"""Models that are built, trained and dropped leave nothing behind."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BEFORE, CYCLES = 3, 8
# MB in each cycle: less than a model's weight, which has 20.
ALLOWED = 5

CYCLES_OF = """
import gc, json, sys
import keras_towers as kt
kt.virtual_towers(2)
import keras, numpy as np, psutil

x = np.zeros((4, 500), "float32")

def build():
    wide = keras.layers.Dense(10_000, use_bias=False)
    model = keras.Sequential([keras.Input((500,)), wide])
    model.compile(keras.optimizers.SGD(0.1), lambda y, z: z)
    return model

def fit():
    build().fit(x, x, batch_size=4, verbose=0)

def enter_and_fit():
    model = build()
    with kt.TowerStrategy(2):
        model.fit(x, x, batch_size=4, verbose=0)

def cycle(use):
    use()
    keras.utils.clear_session()
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20

def used(use):
    print(json.dumps([cycle(use) for _ in range(int(sys.argv[1]))]))
"""

USES = {
    "blocks": "used(enter_and_fit)",
    "one block": "with kt.TowerStrategy(2): used(fit)",
}


@pytest.mark.parametrize("use", USES)
def test_memory_stays_flat(use):
    script = CYCLES_OF + USES[use]
    ended = subprocess.run(
        [sys.executable, "-c", script, str(BEFORE + CYCLES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    used = json.loads(ended.stdout)
    grown = used[-1] - used[BEFORE - 1]
    assert grown < ALLOWED * CYCLES, [round(each) for each in used]
