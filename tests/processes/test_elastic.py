"""Workers that are killed or fail while others train, and new ones."""

import importlib.util
import itertools

import pytest

from tests.kit.processes import Launched
from tests.kit.sampling import on_some_days, sample_of
from tests.kit.scripts import write_executable

pytestmark = pytest.mark.slow
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


def steps(folder):
    """The epoch, the batch and the number of ranks of each batch."""
    lines = (folder / "steps").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


@on_some_days()
@pytest.mark.parametrize("updates", sample_of(["once", "sharded"]))
def test_training_goes_on_and_ends_as_if_nothing_had_happened(
    tmp_path, updates
):
    hosts = write_executable(
        tmp_path / "hosts.sh",
        "\n".join(f"echo 127.0.0.{number}:1" for number in (1, 2, 3)),
    )
    (tmp_path / "victim").touch()
    options = (
        *("--min-np", "2", "--max-np", "3"),
        *("--host-discovery-script", str(hosts)),
        # The others are to have gone on before there is a new one.
        *("--blacklist-cooldown-range", "8", "10"),
    )
    worker = "-m", "tests.processes.enduring", str(tmp_path)
    job = Launched(tmp_path, *options, *worker, TESTED_UPDATES=updates)
    done = job.finish(200)
    assert done.code == 0, done.out + done.err
    # Those that stayed and the one that came all compare with one process.
    assert done.out.count("as undisturbed") == 3
    done_steps = steps(tmp_path)
    sizes = [s for s, _ in itertools.groupby(s for _, _, s in done_steps)]
    assert sizes == [3, 2, 3]
    killed = [size for _, _, size in done_steps].index(2)
    assert done_steps[killed - 1][:2] == (1, 13)
    # From the commit behind batch 12: eight of twenty are left. The new worker
    # may join in between, at the next commit.
    rest = [batch for epoch, batch, _ in done_steps[killed:] if epoch == 1]
    assert rest[0] == 0
    assert len(rest) == 8


@on_some_days(3)
@pytest.mark.parametrize(
    ("strategy", "standby"),
    sample_of(
        itertools.product(
            ["multi-worker", "byteps", "horovod"], [(), ("--standby",)]
        ),
        part=6,
    ),
)
def test_a_job_that_is_started_again_ends_as_if_nothing_had_happened(
    tmp_path, strategy, standby
):
    if strategy == "byteps" and not importlib.util.find_spec("byteps"):
        pytest.skip("BytePS is not installed: make .venv/byteps-cpu")
    (tmp_path / "victim").touch()
    count = "--workers" if strategy == "multi-worker" else "-np"
    options = (*(count, "2"), *("--restarts", "1"), *standby)
    servers = ("--servers", "1") if strategy == "byteps" else ()
    worker = "-m", "tests.processes.enduring", str(tmp_path), strategy
    done = Launched(tmp_path, *options, *servers, *worker).finish(220)
    assert done.code == 0, done.out + done.err
    assert done.out.count("as undisturbed") == 2
    assert "1 was killed by SIGKILL" in done.err
    batches = steps(tmp_path)
    # From the backup behind batch 12: eight of twenty are left.
    again = batches.index((1, 0, 2), batches.index((1, 0, 2)) + 1)
    assert batches[again - 1] in [(1, 12, 2), (1, 13, 2)]
    assert [b for e, b, _ in batches[again:] if e == 1] == [*range(8)]


# Whose fault an error is, `tests/launching/test_supervision.py` shows.
@pytest.mark.long
def test_an_error_of_the_script_is_not_taken_for_a_lost_worker(tmp_path):
    (tmp_path / "script.py").write_text(OWN_ERROR)
    arguments = "--min-np", "2", "script.py"
    done = Launched(tmp_path, *arguments).finish()
    assert done.code == 1, done.out + done.err
    assert "UnknownError: Horovod: Read error [a]" in done.err
    # Nobody has tried it again.
    assert done.out.count("training") == 2
