"""A worker that a signal ends, and that goes on when it is started again."""

import sys
import time

import keras_towers as kt
from tests.processes import small as s

FOLDER = sys.argv[1]


def slow(mine):
    with open(f"{FOLDER}/steps", "a") as file:
        file.write("done\n")
    time.sleep(0.05)


noted = kt.ChiefOnly(s.Does(on_train_batch_end=slow))
backup = kt.Backup(f"{FOLDER}/backup")
s.assert_as_one_process(
    s.eager(),
    lambda it: s.fit(it, batch_size=4, epochs=3, callbacks=[noted, backup]),
    reference=lambda it: s.fit(it, batch_size=4, epochs=3),
)
print("as undisturbed", flush=True)
