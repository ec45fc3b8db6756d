"""GPUs give the weights and the ``History`` that one GPU gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.cases import CASES, HARDEST
from tests.compatibility import test_custom_loop as loops
from tests.exactness.test_contract import MODES
from tests.fit.data.prefetched import (
    assert_drawn_ahead,
    assert_strings_are_exact,
)
from tests.gpu.towers import (
    HARD,
    TOLERANCE,
    assert_contract,
    some_on_cpus,
    strategy,
    towers,
)
from tests.kit import gpus, meshes
from tests.kit.compare import assert_all_close, assert_exact
from tests.kit.sampling import draw
from tests.kit.training import X, Y, adam, classifier, compiled, fit, stacked
from tests.strategies.async_cases import order_free

pytestmark = [pytest.mark.gpu, pytest.mark.alternate]

IMAGES = np.random.default_rng(0).random((len(X), 8, 8, 3), "float32")


TOWERS, SERVED = kt.TowerStrategy, kt.ParameterServerTowerStrategy
PACKER = kt.GradientPacker(num_split=2, min_elements=2)
PACKED, _ = draw(MODES, 3)
SHARED = [*HARDEST, "ema-overwrite", "loss-scale-overflow", "uneven"]


def cases():
    """Cases of the contract and strategies that they are tried on."""
    for names, make, options in (
        (CASES, TOWERS, {}),
        *((HARD, TOWERS, {"mode": mode}) for mode in MODES),
        ([*HARDEST, "loss-scale-overflow"], TOWERS, {"updates": "once"}),
        *((SHARED, SERVED, {"ps_device": on}) for on in ("host", "towers")),
        (["uneven"], TOWERS, {"number": 1}),
        # Packing changes no weight.
        *(
            (["uneven"], TOWERS, {"mode": mode, "packer": packer})
            for mode in MODES
            for packer in (PACKER, False)
        ),
    ):
        on = "-".join(map(str, options.values())).replace(str(PACKER), "packed")
        for name in names:
            yield pytest.param(name, make, options, id=f"{name}-{on}")


def is_kept(case):
    """Whether CPUs have a case: copies, and packing of some sums."""
    name, make, options = case.values
    if make is TOWERS and not options:
        return name in ("embedding-clipped", "sync-batch-norm")
    return options.get("packer") is PACKER and options["mode"] in PACKED


@pytest.mark.parametrize(
    ("name", "make", "options"), some_on_cpus(is_kept, cases())
)
def test_case(name, make, options):
    assert_contract(name, strategy(make, **options))


def conv_net():
    """Convolutions, which cuDNN computes, and what couples examples."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(6, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.SpatialDropout2D(0.3, seed=5),
            layers.Flatten(),
            layers.Dropout(0.3, seed=6),
            layers.Dense(3),
        ]
    )


def recurrent():
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(14, 5, mask_zero=True),
            layers.LSTM(6, return_sequences=True),
            layers.GRU(4),
            layers.Dense(3),
        ]
    )


def in_all_calls(model):
    logs = [
        model.train_on_batch(X[rows], Y[rows], return_dict=True)
        for rows in (slice(9), slice(9, 18))
    ]
    tested = model.evaluate(X, Y, batch_size=7, verbose=0)
    return logs, tested, model.predict(X, batch_size=7, verbose=0)


def from_a_pipeline(model):
    # Towers get parts of two sizes, and none in the last batch.
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).take(15)
    data = rows.batch(7).map(lambda x, y: (2.0 * x, y))
    return model.fit(data, epochs=2, verbose=0).history


SENTENCES = m.SENTENCES[: len(X)]
MODELS = {
    "convolutions": (compiled(conv_net), lambda model: fit(model, 2, IMAGES)),
    "recurrent": (compiled(recurrent), lambda model: fit(model, 1, SENTENCES)),
    "xla": (compiled(jit_compile=True), fit),
    "no xla": (compiled(jit_compile=False), fit),
    "all calls": (classifier, in_all_calls),
    "pipeline": (classifier, from_a_pipeline),
}


@pytest.mark.parametrize(
    "name", some_on_cpus(lambda name: name == "all calls", MODELS)
)
def test_other_models(name):
    make, act = MODELS[name]
    # XLA, which one device uses in a graph only, draws other numbers.
    assert_exact(make, act, strategy(), tolerance=TOLERANCE, in_graph=True)


def wide():
    return [
        layers.Dense(8, "tanh", name="wide"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(3, name="out"),
    ]


@pytest.mark.skipif(len(towers()) % 2, reason="an odd number of GPUs")
def test_a_mesh():
    names = [f"{gpus.KIND}:{k}" for k, _ in enumerate(towers())]
    mesh = meshes.mesh_of(len(names) // 2, 2, devices=names)
    layouts = {
        ".*wide/kernel": (None, "model"),
        ".*out/kernel": ("model", None),
    }
    on = kt.ModelParallelStrategy(meshes.layout_map(mesh, layouts))
    make = stacked(wide, optimizer=adam)
    # XLA, which one device uses in a graph only, draws other numbers.
    assert_exact(make, fit, on, tolerance=TOLERANCE, in_graph=True)


def test_custom_loop():
    loops.assert_exact(strategy(), "adamw", loops.dense_model, "step function")


@pytest.mark.parametrize("mode", some_on_cpus("towers".__eq__, MODES))
def test_two_runs_are_equal_to_the_bit(mode):
    """Where TensorFlow's ops are deterministic, nothing else differs."""
    from tensorflow.python.framework.config import disable_op_determinism

    def trained():
        model = classifier()
        with strategy(mode=mode):
            fit(model, 2)
        return model.get_weights()

    tf.config.experimental.enable_op_determinism()
    try:
        assert_all_close(trained(), trained(), 0)
    finally:
        disable_op_determinism()


def test_strings_stay_on_the_host():
    assert_strings_are_exact(strategy(), tolerance=TOLERANCE)


def test_the_next_batch_is_drawn_while_this_one_computes():
    assert_drawn_ahead(strategy())


def test_asynchronous_gradients_add_up():
    # No gradient depends on the weights, so that their order does not matter.
    mine, alone = (order_free(keras.optimizers.SGD(0.01)) for _ in range(2))
    labels = np.float32(m.LABELS[: len(X)])[:, None] + 1.0
    with strategy(kt.AsyncTowerStrategy, scale_gradient=False) as ours:
        fit(mine, 3, y=labels)
        assert ours.staleness.max < 4 * len(towers())
    fit(alone, 3, y=labels)
    # The losses do depend on them.
    assert_all_close(mine.weights, alone.weights, 1e-4)
