"""Workers that are killed or fail while others train, and new ones."""

import contextlib
import itertools
import os
import signal
import time

import pytest

from tests.kit.long import long_but
from tests.launching.jobs import Launched

# An error of the script's own that sounds like a lost connection.
OWN_ERROR = """
import keras, numpy as np, tensorflow as tf
import keras_towers as kt
from keras_towers import elastic

class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            print("training", flush=True)
            raise tf.errors.UnknownError(None, None, "Horovod: Read error [a]")

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
x = np.ones((400, 4), "float32")

@elastic.run
def train(state):
    with kt.HorovodStrategy():
        model.fit(x, x[:, :2], batch_size=4, verbose=0, callbacks=[Fails()])

train(elastic.State(model))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "updates", long_but("once".__eq__, ("once", "sharded"))
)
def test_training_goes_on_and_ends_as_if_nothing_had_happened(
    tmp_path, updates
):
    hosts = tmp_path / "hosts.sh"
    hosts.write_text(
        "#!/bin/sh\n" + "".join(f"echo 127.0.0.{n}:1\n" for n in (1, 2, 3))
    )
    hosts.chmod(0o755)
    done = Launched(
        tmp_path,
        ("--min-np", "2", "--max-np", "3")
        + ("--host-discovery-script", str(hosts))
        + ("--blacklist-cooldown-range", "3", "5")
        + ("-m", "tests.processes.survivors", str(tmp_path)),
        TESTED_UPDATES=updates,
    ).finish(200)
    assert done.code == 0, done.out + done.err
    # Those that stayed and the one that came all compare with one process.
    assert done.out.count("as undisturbed, after [0, 1, 2, 3, 4, 5]") == 3
    steps = [
        tuple(map(int, line.split()))
        for line in (tmp_path / "steps").read_text().splitlines()
    ]
    sizes = [size for size, _ in itertools.groupby(s for _, _, s in steps)]
    assert sizes == [3, 2, 3]
    killed = [size for _, _, size in steps].index(2)
    assert steps[killed - 1][:2] == (1, 13)
    # From the commit behind batch 12: eight of twenty are left. The new worker
    # may join in between, at the next commit.
    rest = [batch for epoch, batch, _ in steps[killed:] if epoch == 1]
    assert rest[0] == 0
    assert len(rest) == 8


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("travels", ["none", "default"])
def test_two_are_killed_in_a_row(tmp_path, travels):
    done = _two_killed(tmp_path / "first", travels)
    if "gloo::EnforceNotMet" in done.err:
        # Now and then Gloo takes what was meant for a broken connection for a
        # message on the new one, and ends its process, which nobody can catch.
        done = _two_killed(tmp_path / "second", travels)
    assert done.code == 0, done.out + done.err
    assert 1 <= done.out.count("as undisturbed after 6 epochs") <= 3
    assert "Traceback" not in done.err
    assert "retracing" not in done.err


def _two_killed(folder, travels):
    folder.mkdir()
    (folder / "stay").touch()
    job = Launched(
        folder,
        ("--min-np", "1", "-np", "3", "--blacklist-cooldown-range", "1", "5")
        + ("-m", "tests.processes.enduring", str(folder), travels)
        + ("6", "1400"),
    )
    job.wait_for(folder / "steps", lines=3)
    until = time.monotonic() + 30
    while len(first := list((folder / "workers").iterdir())) < 3:
        assert time.monotonic() < until
        time.sleep(0.05)
    (folder / "stay").unlink()
    os.kill(int(first[0].name), signal.SIGKILL)
    time.sleep(3)
    # The others connect anew, or a new worker comes.
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(first[1].name), signal.SIGKILL)
    return job.finish(120)


@pytest.mark.slow
def test_an_error_of_the_script_is_not_taken_for_a_lost_worker(tmp_path):
    (tmp_path / "script.py").write_text(OWN_ERROR)
    done = Launched(tmp_path, ("--min-np", "2", "script.py")).finish(60)
    assert done.code == 1, done.out + done.err
    assert "UnknownError: Horovod: Read error [a]" in done.err
    # Nobody has tried it again.
    assert done.out.count("training") == 2
