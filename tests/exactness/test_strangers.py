"""Steps in the style of keras.io, papers and projects, as on one device.

They combine what tests elsewhere show one by one. `make test` draws some of
them by a seed; `make test-all` has all of them.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness.strangers import CASES
from tests.kit.long import some_of

DRAWN = 12


@pytest.mark.parametrize("name", some_of(CASES, DRAWN))
def test_a_step_of_a_stranger(name):
    wanted = trained(name, contextlib.nullcontext())
    found = trained(name, kt.TowerStrategy(3))
    assert found.keys() == wanted.keys()
    tolerance = CASES[name][1].get("tolerance", 1e-4)
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        if value.dtype.kind in "OSU":
            np.testing.assert_array_equal(found[key], value, key)
            continue
        np.testing.assert_allclose(
            found[key], value, tolerance, tolerance / 10, err_msg=key
        )


def trained(name, context):
    """Train a new model; return all that can be seen of it."""
    build, options = CASES[name]
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    keras.config.set_dtype_policy(options.get("policy", "float32"))
    model, x, y = build()
    with context:
        seen = x(model) if callable(x) else used(model, x, y, **options)
    for number, variable in enumerate(model.variables):
        seen[f"{number} {variable.path}"] = variable.value.numpy()
    for name, value in sorted(vars(model).items()):
        if isinstance(value, keras.optimizers.Optimizer):
            for number, variable in enumerate(value.variables):
                # Models are built in other orders, so that paths may differ.
                key = f"{name} {number} {variable.name}"
                seen[key] = variable.value.numpy()
        elif isinstance(value, tf.Variable):
            seen[name] = np.array(value.numpy())
    return seen


def used(
    model,
    x,
    y,
    batch=13,
    fit=None,
    callbacks=(),
    evaluate=True,
    predict=True,
    **_,
):
    """Fit, evaluate and predict; return the results by their names."""
    data = {"x": x}
    if not isinstance(x, tf.data.Dataset):
        data.update(y=y, batch_size=batch)
    history = model.fit(
        **data,
        **(fit or {}),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[callback() for callback in callbacks],
    )
    seen = {f"fit {k}": np.array(v) for k, v in history.history.items()}
    if evaluate:
        logs = model.evaluate(**data, verbose=0, return_dict=True)
        seen |= {f"evaluate {k}": np.array(v) for k, v in logs.items()}
    if predict:
        if "y" in data:
            del data["y"]
        else:
            data["x"] = x.map(lambda *parts: parts[0])
        outputs = tf.nest.flatten(model.predict(**data, verbose=0))
        seen |= {f"predict {k}": np.array(v) for k, v in enumerate(outputs)}
    return seen
