"""One variable on every tower: reads and writes inside and outside."""

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.weights import variables as lib

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


def on_towers(strategy, fn):
    """Run ``fn(index)`` in the towers, as a step does; per-tower results."""

    def step():
        context = tf.distribute.get_replica_context()
        index = int(tf.get_static_value(context.replica_id_in_sync_group))
        tower = tower_lib.Tower(index, TOWERS, share=1 / TOWERS)
        with replica_context.activate(tower):
            result = fn(index)
        return result if tf.is_tensor(result) else tf.constant(0)

    with strategy.scope():
        results = tf.function(lambda: strategy.run(step))()
        return [r.numpy() for r in strategy.experimental_local_results(results)]


def test_components_start_on_their_towers(strategy):
    for merge, wanted in (
        (lib.MEAN, [5.0, 5.0, 5.0]),
        (lib.FIRST, [5.0, 5.0, 5.0]),
        (lib.SUM, [5.0, 0.0, 0.0]),
    ):
        variable = spread(strategy, merge)
        assert components(variable) == wanted
        places = [tf.DeviceSpec.from_string(v.device) for v in variable.values]
        assert [place.device_index for place in places] == [0, 1, 2]
    # The first is the variable itself.
    primary = tf.Variable([1.0])
    variable = lib.spread(strategy._config, primary, lib.MEAN)
    assert variable.values[0] is primary
    assert lib.unbind(variable) is primary
    assert not hasattr(primary, "_distributed_container")


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


@pytest.mark.parametrize(
    "merge, value, left",
    [(lib.MEAN, 6.0, 6.0), (lib.FIRST, 5.0, 5.0), (lib.SUM, 18.0, 18.0)],
)
def test_towers_write_and_read_their_own(strategy, merge, value, left):
    variable = spread(strategy, merge)
    on_towers(strategy, lambda index: variable.assign(5.0 + index))
    own = [5.0, 6.0, 7.0]
    assert components(variable) == own
    reads = [
        variable.read_value,
        variable.value,
        lambda: tf.convert_to_tensor(variable),
        lambda: variable + 0.0,
        lambda: tf.identity(variable),
    ]
    if merge == lib.MEAN:
        found = on_towers(strategy, lambda _: tf.stack([r() for r in reads]))
        assert [row.tolist() for row in found] == [5 * [v] for v in own]
    assert float(variable.merged_value()) == value
    assert [float(read()) for read in reads] == 5 * [value]
    assert variable.numpy() == value
    # Outside a write is what a read gives.
    variable.assign(9.0)
    assert components(variable) == (
        [9.0, 0.0, 0.0] if merge == lib.SUM else [9.0, 9.0, 9.0]
    )
    variable.assign_add(1.0)
    assert variable.numpy() == 10.0
    variable.assign_sub(4.0)
    assert variable.numpy() == 6.0
    on_towers(strategy, lambda index: variable.assign(5.0 + index))
    assert lib.unbind(variable).numpy() == left
    with strategy.scope():
        variable.assign(2.0)
        assert variable.numpy() == 2.0
