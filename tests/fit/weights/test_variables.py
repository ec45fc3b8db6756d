"""One variable on every tower: reads and writes inside and outside."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.weights import agreement
from keras_towers.fit.weights import variables as lib
from keras_towers.fit.weights.shares import BatchShares
from tests.exactness import models as m
from tests.kit.training import compiled

pytestmark = pytest.mark.core

TOWERS = 3


@pytest.fixture
def strategy():
    return kt.TowerStrategy(TOWERS)


def spread(strategy, merge, value=5.0, dtype="float32"):
    primary = tf.Variable(value, dtype=dtype)
    return lib.spread(strategy._config, primary, merge)


def components(variable):
    return [component.numpy().tolist() for component in variable.values]


def on_towers(strategy, fn, live=None):
    """Run ``fn(index)`` in the towers, as a step does; per-tower results."""

    def step():
        context = tf.distribute.get_replica_context()
        index = int(tf.get_static_value(context.replica_id_in_sync_group))
        tower = tower_lib.Tower(
            index,
            TOWERS,
            share=1 / TOWERS,
            live=None if live is None else live[index],
        )
        with replica_context.activate(tower):
            result = fn(index)
        return result if tf.is_tensor(result) else tf.constant(0)

    with strategy.scope():
        results = tf.function(lambda: strategy.run(step))()
        return [r.numpy() for r in strategy.experimental_local_results(results)]


def test_components_start_equal_or_with_zeros(strategy):
    assert components(spread(strategy, lib.MEAN)) == [5.0, 5.0, 5.0]
    assert components(spread(strategy, lib.FIRST)) == [5.0, 5.0, 5.0]
    assert components(spread(strategy, lib.SUM)) == [5.0, 0.0, 0.0]


def test_each_component_is_on_its_tower(strategy):
    variable = spread(strategy, lib.MEAN)
    numbers = [tf.DeviceSpec.from_string(v.device) for v in variable.values]
    assert [n.device_index for n in numbers] == [0, 1, 2]


def test_random_states_differ_between_towers_and_come_back(strategy):
    last = 2**32 - 2  # The offsets go over the end of the range.
    state = np.array([last, 7], "uint32")
    primary = tf.Variable(state)
    variable = lib.spread(strategy._config, primary, lib.STREAM)
    first, second, third = components(variable)
    assert first == state.tolist()
    assert len({first[0], second[0], third[0]}) == TOWERS
    assert {first[1], second[1], third[1]} == {7}
    variable.assign([1, 8])
    assert components(variable)[0] == [1, 8]
    assert components(variable)[1][0] == 1 + lib._SEED_STRIDE
    variable._first_tower = 4
    variable.assign(state)
    assert components(variable)[0][0] == (last + 4 * lib._SEED_STRIDE) % 2**32
    assert variable.numpy().tolist() == state.tolist()
    assert lib.unbind(variable).numpy().tolist() == state.tolist()


def test_first_component_is_the_variable_itself(strategy):
    primary = tf.Variable([1.0])
    variable = lib.spread(strategy._config, primary, lib.MEAN)
    assert variable.values[0] is primary
    assert lib.unbind(variable) is primary
    assert not hasattr(primary, "_distributed_container")


@pytest.mark.parametrize("merge,value", [("mean", 6.0), ("first", 5.0)])
def test_towers_write_their_own(strategy, merge, value):
    variable = spread(strategy, merge)
    on_towers(strategy, lambda index: variable.assign(5.0 + index))
    assert components(variable) == [5.0, 6.0, 7.0]
    assert float(variable.merged_value()) == value
    assert float(variable.read_value()) == value
    assert float(tf.convert_to_tensor(variable)) == value
    assert float(variable + 0.0) == value
    assert variable.numpy() == value
    assert lib.unbind(variable).numpy() == (value if merge == "mean" else 5.0)


def test_sum(strategy):
    variable = spread(strategy, lib.SUM)
    on_towers(strategy, lambda index: variable.assign_add(1.0 + index))
    assert components(variable) == [6.0, 2.0, 3.0]
    assert variable.numpy() == 11.0
    assert lib.unbind(variable).numpy() == 11.0


def test_towers_read_their_own(strategy):
    variable = spread(strategy, lib.MEAN)
    on_towers(strategy, lambda index: variable.assign(10.0 * index))
    reads = {
        "read_value": lambda _: variable.read_value(),
        "value": lambda _: variable.value(),
        "convert": lambda _: tf.convert_to_tensor(variable),
        "add": lambda _: variable + 0.0,
        "identity": lambda _: tf.identity(variable),
    }
    found = {name: on_towers(strategy, read) for name, read in reads.items()}
    assert found == {name: [0.0, 10.0, 20.0] for name in reads}


def test_a_value_that_was_read_stays(strategy):
    # A read gives a tensor, not the variable, which will have changed.
    variable = spread(strategy, lib.MEAN)

    def read_then_write(index):
        before = variable.read_value()
        variable.assign(100.0 + index)
        return before + 0.0

    assert on_towers(strategy, read_then_write) == [5.0, 5.0, 5.0]
    before = variable.read_value()
    variable.assign(0.0)
    assert float(before) == 101.0


@pytest.mark.parametrize("merge", [lib.MEAN, lib.SUM, lib.FIRST])
def test_outside_a_write_is_what_a_read_gives(strategy, merge):
    variable = spread(strategy, merge)
    on_towers(strategy, lambda index: variable.assign(float(index)))
    variable.assign(9.0)
    assert variable.numpy() == 9.0
    assert components(variable) == (
        [9.0, 0.0, 0.0] if merge == lib.SUM else [9.0, 9.0, 9.0]
    )
    variable.assign_add(1.0)
    assert variable.numpy() == 10.0
    variable.assign_sub(4.0)
    assert variable.numpy() == 6.0
    with strategy.scope():
        variable.assign(2.0)
        assert variable.numpy() == 2.0


def test_add_and_subtract_in_towers(strategy):
    variable = spread(strategy, lib.MEAN)
    on_towers(strategy, lambda index: variable.assign_add(index))
    on_towers(strategy, lambda index: variable.assign_sub(1.0))
    assert components(variable) == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_whole_numbers_lose_no_counts(strategy, dtype):
    # Divided over three towers, seven would become six.
    variable = spread(strategy, lib.SUM, 7, dtype)
    assert variable.numpy() == 7
    variable.assign(8)
    on_towers(strategy, lambda index: variable.assign_add(1))
    assert variable.numpy() == 11
    assert lib.unbind(variable).numpy() == 11


def test_a_tower_without_examples_adds_nothing_to_a_sum(strategy):
    variable = spread(strategy, lib.SUM)
    live = [tf.constant(index != 1) for index in range(TOWERS)]
    on_towers(strategy, lambda index: variable.assign(7.0), live)
    assert components(variable) == [7.0, 0.0, 7.0]
    on_towers(strategy, lambda index: variable.assign_add(1.0), live)
    assert components(variable) == [8.0, 0.0, 8.0]


def test_it_writes_what_is_no_sum(strategy):
    live = [tf.constant(index != 1) for index in range(TOWERS)]
    for merge in (lib.MEAN, lib.FIRST):
        variable = spread(strategy, merge)
        on_towers(strategy, lambda index, v=variable: v.assign(7.0), live)
        assert components(variable) == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("total", [7, 2, 6])
def test_means_are_weighted_by_shares_of_the_batch(strategy, total):
    shares = BatchShares(strategy._config)
    primary = tf.Variable(5.0)
    variable = lib.spread(strategy._config, primary, lib.MEAN, shares)
    on_towers(strategy, lambda index: variable.assign(float(index)))
    counts = [len(part) for part in np.array_split(np.arange(total), TOWERS)]
    shares.end_step(counts)
    wanted = np.average(range(TOWERS), weights=counts)
    np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-6)
    shares.forget()
    np.testing.assert_allclose(variable.numpy(), 1.0)


def test_average(strategy):
    variable = spread(strategy, lib.MEAN)
    on_towers(strategy, lambda index: variable.assign(float(index)))
    assert components(variable) == [0.0, 1.0, 2.0]
    agreement.average(strategy._config.transport, [variable])
    assert components(variable) == [1.0, 1.0, 1.0]


def test_hand_out(strategy):
    variable = spread(strategy, lib.MEAN)
    variable.values[0].assign(8.0)
    plain = tf.Variable(1.0)
    lib.copy_to_towers([variable, plain])
    assert components(variable) == [8.0, 8.0, 8.0]
    assert plain.numpy() == 1.0


def test_viewed_is_undone_after_an_error(strategy):
    keras_variable = keras.Variable(np.ones(2, "float32"))
    value = spread(strategy, lib.MEAN)
    keras_variable._value = value
    with (
        pytest.raises(KeyError),
        lib.viewed([keras_variable], lambda v: v.values[1]),
    ):
        assert keras_variable._value is value.values[1]
        raise KeyError
    assert keras_variable._value is value


def test_a_users_own_step_reads_the_model(strategy):
    # In a custom loop inside the scope, on a model that is on the towers.
    model = compiled()()
    with strategy:
        strategy.adopt(model)
        kernel = model.layers[0].kernel
        sums = strategy.run(lambda: tf.reduce_sum(kernel.value))
        results = strategy.experimental_local_results(sums)
        wanted = float(np.sum(kernel.numpy()))
        assert [float(r) for r in results] == pytest.approx([wanted] * 3)

        metric = keras.metrics.SparseCategoricalAccuracy()
        outputs = tf.function(
            lambda: strategy.run(lambda x: model(x), (m.FEATURES,))
        )()
        for output in strategy.experimental_local_results(outputs):
            np.testing.assert_allclose(output, model(m.FEATURES), rtol=1e-5)
        assert metric.result() == 0.0
