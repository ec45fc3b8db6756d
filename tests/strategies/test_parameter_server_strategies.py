"""Where the weights of parameter-server towers are, and that they come back."""

import keras
import pytest

import keras_towers as kt
from keras_towers.foundation import compat
from keras_towers.inspection.conformance import case_models as m
from tests.kit.training import adam, fit


def build(*middle, optimizer=adam, **options):
    # The last layer draws its seed when it is created.
    keras.utils.set_random_seed(1)
    model = m.mlp(*middle, keras.layers.Dense(16))
    model.compile(optimizer(), m.cross_entropy(), **options)
    return model


def place(variable):
    return int(variable._value.device.rpartition(":")[2])


def with_slots(model):
    weights, adam = model.trainable_variables, model.optimizer
    return zip(weights, adam._momentums, adam._velocities, strict=True)


def test_default_by_the_number_of_towers():
    for towers, expected, said in (
        (2, "towers", "weights are spread over the towers"),
        (3, "host", "weights are in CPU memory"),
    ):
        strategy = kt.ParameterServerTowerStrategy(towers)
        assert strategy.ps_device == expected
        assert said in strategy.describe()


def test_weights_are_spread_by_bytes_and_exist_once():
    model = build(keras.layers.BatchNormalization())
    with kt.ParameterServerTowerStrategy(3, ps_device="towers") as strategy:
        assert "bytes" not in strategy.describe()
        fit(model)
        loads = [0, 0, 0]
        for weight, *slots in with_slots(model):
            assert not hasattr(weight._value, "values")
            loads[place(weight)] += weight._value.shape.num_elements() * 4
            assert {place(slot) for slot in slots} == {place(weight)}
        assert loads == list(strategy.placement.loads.values())
        largest = 7 * 16 * 4
        assert max(loads) - min(loads) <= largest
        assert not hasattr(model.layers[1].moving_mean._value, "values")
        inside = strategy.describe()
        for kind, variables in (
            ("weights", model.weights),
            ("optimizer state", model.optimizer.variables),
        ):
            held = [0, 0, 0]
            for variable in variables:
                held[place(variable)] += variable.numpy().nbytes
            on = (f"{n:,} bytes on /device:CPU:{k}" for k, n in enumerate(held))
            assert f"{kind}: {', '.join(on)}\n" in f"{inside}\n"
    # It tells where they were.
    assert strategy.describe() == inside
    with strategy:
        strategy.adopt(model)
        # Placed anew; slots, which are there already, beside their weights.
        assert loads == list(strategy.placement.loads.values())
        for weight, *slots in with_slots(model):
            assert {place(slot) for slot in slots} == {place(weight)}


def definitions():
    context = compat.eager_context()
    names = context.list_function_names()
    return {name: context.get_function_def(name) for name in names}


@pytest.mark.parametrize("ps_device", ["host", "towers"])
def test_update_is_computed_beside_its_weight(ps_device):
    before = definitions()
    model = build(optimizer=keras.optimizers.AdamW)
    towers = ["/device:CPU:2", "/device:CPU:1"]
    with kt.ParameterServerTowerStrategy(towers, ps_device=ps_device):
        model.train_on_batch(m.FEATURES, m.LABELS)
        state = [*model.trainable_variables, *model.optimizer.variables]
        places = {place(v) for v in model.trainable_variables}
        if ps_device == "host":
            assert {place(variable) for variable in state} == {0}
    assert places == ({0} if ps_device == "host" else {1, 2})
    # Of each weight the optimizer takes the root of a slot.
    roots = [
        node.device
        for name, definition in definitions().items()
        if name not in before
        for node in definition.node_def
        if node.op == "Sqrt" and node.device
    ]
    assert len(roots) >= len(model.trainable_variables)
    assert {int(device[-1]) for device in roots} == places
