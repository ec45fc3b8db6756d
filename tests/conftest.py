"""Eight logical CPUs for every test, set before TensorFlow starts.

In a session on GPUs (``tests/kit/gpus.py``) those take their place.
"""

import gc
import itertools
import os
import pathlib
import signal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
if "KERAS_TOWERS_TEST_OPTIMIZED" not in os.environ:
    # XLA takes much longer to optimize a step of these models than to run it.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest
import tensorflow as tf

from keras_towers import virtual_towers
from keras_towers.foundation import settings
from tests.kit import gpus, sampling, scripts, untuned
from tests.kit.again import starts_again as starts_again
from tests.kit.processes import Tasks

TOWERS = 8
# Its jobs take longest: nobody is to wait for them at the end.
FIRST = "tests/processes/test_ranks.py"

# For the processes that tests start.
LEAN = pathlib.Path(__file__).with_name("kit") / "lean"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(LEAN), str(scripts.ROOT), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)

if gpus.ON:
    gpus.use()
else:
    virtual_towers(TOWERS)
    tf.config.threading.set_inter_op_parallelism_threads(TOWERS)
    # Starts TensorFlow, so that a snippet which splits the CPU in four cannot.
    tf.config.list_logical_devices()

scripts.forget_launchers()
untuned.leave_untuned(optimize=bool(gpus.ON))

# Traces make many objects, and few circles of them that end soon.
gc.set_threshold(50_000, 20, 50)

_collective_keys = itertools.count(10_000, 1_000)


@pytest.fixture(autouse=True)
def own_collective_keys(monkeypatch):
    """Keep TensorFlow's own strategies of different tests apart.

    They number their collectives all alike, and two of different size in one
    process break each other.
    """
    name, key = "_collective_key_base", next(_collective_keys)
    monkeypatch.setattr(tf.distribute.MirroredStrategy, name, key)


@pytest.fixture(autouse=True)
def same_draws():
    """What a test draws does not depend on those that ran before it."""
    import keras

    keras.utils.set_random_seed(25)


@pytest.fixture(autouse=True)
def is_no_rank():
    """Processes of a test are not taken for those that a rank has started."""
    yield
    os.environ.pop(settings.ENV_PLACE, None)


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """What a file's tests leave behind is not searched by those of others."""
    yield
    untuned.search_no_more()


@pytest.fixture(autouse=True)
def optimized_graphs(request):
    """Let TensorFlow optimize graphs in the tests that are marked so."""
    marked = request.node.get_closest_marker("optimized") and not gpus.ON
    if marked:
        untuned.do_not_optimize_graphs(False)
    yield
    if marked:
        untuned.do_not_optimize_graphs()


@pytest.fixture
def small_shards(monkeypatch):
    """Weights of any size are divided, as the models of tests are small."""
    from keras_towers.fit.weights import shards

    monkeypatch.setattr(shards, "SMALLEST_BYTES", 1)


@pytest.fixture
def devices():
    """The names of the logical CPUs."""
    return [f"/device:CPU:{index}" for index in range(TOWERS)]


@pytest.fixture(autouse=True)
def nothing_left_patched():
    """Every test leaves Keras, the strategy stack and policies as they were."""
    import keras

    before = {name: getattr(keras.Model, name) for name in ("fit", "evaluate")}
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
    if not gpus.ON:
        # What strategies take by default.
        virtual_towers(TOWERS)
    assert not tf.distribute.has_strategy()
    for name, method in before.items():
        assert getattr(keras.Model, name) is method, f"{name} is still patched"


@pytest.fixture
def ctrl_c():
    """Make SIGINT a Ctrl-C, also in a suite that was started in background.

    Such a process ignores SIGINT from the start, and so does every process
    that it starts: Python then has no handler that would raise. What a process
    handles, on the other hand, is back at the default in those it starts.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tasks(tmp_path, ctrl_c):
    """Starts processes of jobs that no launcher of this package starts."""
    with Tasks(tmp_path) as started:
        yield started


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Choose the tests of the seed, and give slow ones the time they need."""
    sampling.alternate(items)
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(600))


def pytest_report_header():
    """Say which seed has drawn the tests, so that they can be run again."""
    return f"tests drawn by {sampling.SEEDED_BY}={sampling.SEED}"
