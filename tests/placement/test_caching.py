"""Where the readers of a variable keep a copy, and how often they read."""

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import placement as p

GPUS = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
CPU = "/device:CPU:0"
TOWERS = ["/device:CPU:1", "/device:CPU:2"]


def test_caching_on_the_host():
    cache = p.CachingPlacement("cpu", GPUS)
    assert cache("kernel", (10**6,), "float32") == CPU
    assert cache("bias", (1,), "float32") == CPU
    assert cache.describe().splitlines()[1].split() == [CPU, "2", "4,000,004"]


def test_caching_on_the_towers():
    cache = p.CachingPlacement("gpu", GPUS[:2])
    assert cache("small", (64 * 1024 - 1,), "float32") == CPU
    assert cache("large", (64 * 1024,), "float32") == GPUS[0]
    assert cache("larger", (64 * 1024 + 1,), "float32") == GPUS[1]
    assert cache("last", (64 * 1024,), "float32") == GPUS[0]


def test_what_is_not_cached(caplog):
    cache = p.CachingPlacement("gpu", GPUS)
    assert cache("statistics", (10**6,), "float32", trainable=False) is None
    assert cache("unknown", None, "float32") is None
    assert not cache.placement.placed
    assert not caplog.records


@pytest.mark.parametrize("caching_device", ["", "tpu", None, CPU])
def test_other_caching_devices(caching_device):
    with pytest.raises(kt.TowerError, match="'cpu', 'gpu'"):
        p.CachingPlacement(caching_device, GPUS)


@pytest.mark.parametrize("caching_device", p.caching.CACHING_DEVICES)
@pytest.mark.parametrize(
    ("towers", "said"),
    [
        ([], r"towers=\[\] names no devices"),
        (None, "towers=None names no devices"),
        (GPUS[0], "names no devices"),
        (["nonsense"], "'nonsense' is not the name"),
        ([GPUS[0], "/gpu:0"], "/gpu:0 more than once"),
    ],
)
def test_other_towers(caching_device, towers, said):
    with pytest.raises(kt.TowerError, match=said):
        p.CachingPlacement(caching_device, towers)


@pytest.mark.parametrize("caching_device", p.caching.CACHING_DEVICES)
def test_any_iterable_of_towers(caching_device):
    cache = p.CachingPlacement(caching_device, (name for name in GPUS))
    device = cache("kernel", (10**6,), "float32")
    assert device == (CPU if caching_device == "cpu" else GPUS[0])


@pytest.fixture
def weights():
    """A small weight and two large ones, far from the towers."""
    with tf.device("/device:CPU:3"):
        return [
            tf.Variable(tf.fill((300, 300), 0.01), name="first/kernel"),
            tf.Variable(tf.fill((300, 400), 0.02), name="second/kernel"),
            tf.Variable(tf.ones((400,)), name="bias"),
        ]


@pytest.fixture
def cache():
    """Copies on the towers, small ones on the host."""
    return p.ReadCache(p.CachingPlacement("gpu", TOWERS))


def loss(x, first, second, bias):
    return tf.reduce_mean((x @ first @ second + bias) ** 2)


def step(cache, weights, x):
    """One step of all towers.

    Returns:
        The losses, and lists of gradients.
    """
    losses, gradients = [], []
    with cache.step():
        for tower in TOWERS:
            with tf.device(tower), tf.GradientTape() as tape:
                copies = [cache.read(weight) for weight in weights]
                tape.watch(copies)
                losses.append(loss(x, *copies))
            gradients.append(tape.gradient(losses[-1], copies))
    return losses, gradients


def test_each_weight_is_read_once_to_the_device_of_its_copy(cache, weights):
    devices = []

    @tf.function
    def read_by_all():
        with cache.step():
            copies = [cache.read(weight) for _ in TOWERS for weight in weights]
        devices.extend(copy.device[-5:] for copy in copies)

    graph = read_by_all.get_concrete_function().graph
    kinds = [operation.type for operation in graph.get_operations()]
    assert kinds.count("ReadVariableOp") == len(weights)
    assert devices == ["CPU:1", "CPU:2", "CPU:0"] * len(TOWERS)
    placed = [entry.name for entry in cache.placement.placement.placed]
    assert placed == ["first/kernel", "second/kernel", "bias"]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_values_and_gradients_are_those_of_the_variables(cache, weights, graph):
    x = tf.ones((2, 300))
    run = tf.function(step) if graph else step
    for _ in range(2):
        with tf.GradientTape() as tape:
            expected = loss(x, *weights)
        reference = tape.gradient(expected, weights)
        losses, gradients = run(cache, weights, x)
        np.testing.assert_allclose(losses, [expected, expected], rtol=1e-6)
        for mine in gradients:
            for gradient, own in zip(mine, reference, strict=True):
                np.testing.assert_allclose(gradient, own, rtol=1e-5)
        # The next step sees what was written after this one.
        weights[2].assign_add(tf.ones((400,)))


def test_all_towers_see_the_weights_of_one_moment(cache, weights):
    bias = weights[2]
    with cache.step():
        before = cache.read(bias)
        bias.assign(tf.zeros((400,)))
        assert cache.read(bias) is before
    with cache.step():
        assert not np.any(cache.read(bias))


def test_copy_made_in_a_branch_stays_there(cache, weights):
    bias = weights[2]

    @tf.function
    def branches(first):
        with cache.step():
            inside = tf.cond(
                first, lambda: cache.read(bias), lambda: -cache.read(bias)
            )
            return inside, cache.read(bias)

    inside, outside = branches(tf.constant(False))
    np.testing.assert_array_equal(inside, -outside)


def test_what_is_not_cached_is_read_each_time(cache):
    statistics = tf.Variable(1.0, trainable=False)
    with cache.step():
        assert cache.read(statistics) == 1
        statistics.assign(2.0)
        assert cache.read(statistics) == 2


def test_reading_outside_of_a_step(cache, weights):
    with pytest.raises(kt.TowerError, match="cache.step()"):
        cache.read(weights[0])
    with cache.step():
        cache.read(weights[0])
    with pytest.raises(kt.TowerError, match="first/kernel"):
        cache.read(weights[0])
