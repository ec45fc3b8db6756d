"""Large weights in slices: equal to one device, with less memory."""

import contextlib
import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.step.graph import step_layout
from keras_towers.fit.weights import shards
from keras_towers.partition.ir.program import Exchange
from keras_towers.partition.timeline import sliced_uses
from tests.kit.compare import assert_all_close
from tests.partition.order import check_order

LAYERS, OPTIMIZERS = keras.layers, keras.optimizers
TOKENS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(width=32, first=8, **options):
    return keras.Sequential(
        [
            keras.Input((6,)),
            LAYERS.Dense(first, "relu"),
            LAYERS.Dense(width, "relu", **options),
            LAYERS.Dense(4),
        ]
    )


def einsum():
    given = keras.Input((5, 6))
    x = LAYERS.EinsumDense("abc,cde->abde", (None, 4, 8))(given)
    x = LAYERS.EinsumDense("abde,def->abf", (None, 4))(x)
    return keras.Model(given, x)


def of_tokens(words, width):
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            LAYERS.Embedding(words, width),
            LAYERS.Dense(8, "relu"),
            LAYERS.Dense(words),
        ]
    )


def tied():
    table = LAYERS.ReversibleEmbedding(64, 8)
    given = keras.Input((5,), dtype="int32")
    hidden = LAYERS.Dense(8, "relu")(table(given))
    return keras.Model(given, table(hidden, reverse=True))


def adam(**options):
    return functools.partial(OPTIMIZERS.AdamW, 0.01, epsilon=0.1, **options)


# What makes a model, and its optimizer; options of the strategy.
CASES = {
    "columns": (dense, adam(), {}),
    "rows": (functools.partial(dense, 8, 40), adam(), {}),
    "sgd": (dense, functools.partial(OPTIMIZERS.SGD, 0.1), {}),
    "norm": (dense, adam(global_clipnorm=0.1, use_ema=True), {}),
    "lamb": (dense, functools.partial(OPTIMIZERS.Lamb, 0.01), {}),
    "adafactor": (dense, functools.partial(OPTIMIZERS.Adafactor, 0.01), {}),
    "scaled": (dense, lambda: OPTIMIZERS.LossScaleOptimizer(adam()()), {}),
    "constrained": (
        functools.partial(dense, kernel_constraint="unit_norm"),
        adam(),
        {},
    ),
    "regularized": (
        functools.partial(dense, kernel_regularizer="l2"),
        adam(),
        {},
    ),
    "einsum": (einsum, adam(), {}),
    "tokens": (functools.partial(of_tokens, 64, 8), adam(), {}),
    "sparse": (
        functools.partial(of_tokens, 64, 8),
        functools.partial(OPTIMIZERS.SGD, 0.1),
        {},
    ),
    "fewer rows than tokens": (functools.partial(of_tokens, 16, 8), adam(), {}),
    "columns of a table": (functools.partial(of_tokens, 7, 32), adam(), {}),
    "tied": (tied, adam(), {}),
    "tied in parts": (tied, adam(), {"micro_batches": 2}),
    "computed again": (dense, adam(), {"remat": True}),
}


@pytest.fixture
def small_slices(monkeypatch):
    """Small weights are in shards, and in slices; return what is scheduled."""
    monkeypatch.setattr(shards, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(sliced_uses, "_LEAST_BYTES", 1)
    scheduled = []

    def schedule(*args, **kwargs):
        scheduled.append(original(*args, **kwargs))
        check_order(scheduled[-1])
        return scheduled[-1]

    original = step_layout.schedule
    monkeypatch.setattr(step_layout, "schedule", schedule)
    return scheduled


def trained(make, optimizer, strategy=None, xla=False):
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    with strategy or contextlib.nullcontext():
        model = make()
        loss = "mse"
        x = random.random((22, *model.input_shape[1:])).astype("float32")
        y = random.random((22, *model.output_shape[1:])).astype("float32")
        if model.inputs[0].dtype == "int32":
            words = model.output_shape[-1]
            x = y = random.integers(0, words, (22, 5)).astype("int32")
            loss = TOKENS
        model.compile(optimizer(), loss, jit_compile=xla)
        losses = model.fit(x, y, 8, 2, 0, shuffle=False).history["loss"]
        predicted = model.predict(x, verbose=0)
    state = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    return [np.array(losses), predicted, *state]


def in_slices(**options):
    options = {"weights": "sharded", "gather_bytes": 300, **options}
    return kt.TowerStrategy(2, **options)


@pytest.mark.parametrize("name", CASES)
def test_slices_give_the_results_of_one_device(name, small_slices):
    make, optimizer, options = CASES[name]
    wanted = trained(make, optimizer)
    found = trained(make, optimizer, in_slices(**options))
    assert_all_close(found, wanted, 2e-5)
    exchanges = small_slices[0].program.exchanges
    assert any(exchange.part is not None for exchange in exchanges)


def parts_of(timeline):
    """The levels of what gathers and exchanges slices, and of writes."""
    levels = {"gather": [], "scatter": [], "write": []}
    for event in timeline.events:
        if not isinstance(event, Exchange):
            if event.type.startswith("ResourceScatter"):
                levels["write"].append(timeline.levels[event])
        elif event.part is not None or event.kind == "scatter":
            levels[event.kind].append(timeline.levels[event])
    return levels


def test_rows_are_written_as_their_gradients_arrive(small_slices):
    trained(dense, functools.partial(OPTIMIZERS.SGD, 0.1), in_slices())
    step, *_ = small_slices
    levels = parts_of(step)
    assert len({*levels["gather"]}) == len(levels["gather"]) > 6
    # The first rows before the last ones have been exchanged.
    assert min(levels["write"]) < max(levels["scatter"])
    types = {o.type for o in step.program.operations}
    assert "DisableCopyOnRead" in types
    # A variable is read when its slices are gathered.
    assert all(e.reads for e in step.program.exchanges if e.part is not None)


def test_a_step_needs_the_less_memory_the_more_slices(
    small_slices, monkeypatch
):
    make, plans = functools.partial(dense, 4096), []
    for most in (1, 4, 16):
        monkeypatch.setattr(sliced_uses, "_MOST_SLICES", most)
        del small_slices[:]
        trained(make, adam(), in_slices())
        plans.append(small_slices[0].plan.bytes)
    assert plans[0] > 2 * plans[1] > 2.2 * plans[2], plans


def test_what_is_no_larger_than_the_limit_is_whole(small_slices):
    trained(dense, adam(), in_slices(gather_bytes=4096))
    exchanges = small_slices[0].program.exchanges
    assert not any(exchange.part for exchange in exchanges)
    assert not any(
        "slice" in o.suffix for o in small_slices[0].program.operations
    )


def test_compiled_steps_use_slices_too(small_slices):
    wanted = trained(dense, adam())
    found = trained(dense, adam(), in_slices(), xla=True)
    assert_all_close(found, wanted, 2e-5)
    assert any(e.part is not None for e in small_slices[0].program.exchanges)
