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
from keras_towers.partition.timeline.sliced_weights import sliced_uses
from tests.kit import sampling
from tests.kit.compare import assert_all_close
from tests.partition.order import check_order

LAYERS, OPTIMIZERS = keras.layers, keras.optimizers
# The tokens of all models, some of whose tables have rows that are not used.
WORDS = 7


def dense(width=32, first=8, **options):
    return keras.Sequential(
        [
            keras.Input((6,)),
            LAYERS.Dense(first, "relu"),
            LAYERS.Dense(width, "relu", **options),
            LAYERS.Dense(4),
        ]
    )


def language():
    """A table of its own is larger than a tied one and products."""
    given = keras.Input((5,), dtype="int32")
    table = LAYERS.ReversibleEmbedding(41, 8)
    x = table(given) + LAYERS.Embedding(50, 8)(given)
    x = LAYERS.Dense(8)(LAYERS.Dense(20, "relu")(x))
    return keras.Model(given, table(x, reverse=True))


def of_tokens(words, width):
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            LAYERS.Embedding(words, width),
            LAYERS.Dense(40),
        ]
    )


def adam(**options):
    return OPTIMIZERS.AdamW(0.01, epsilon=0.1, **options)


def sgd():
    return OPTIMIZERS.SGD(0.1)


def with_all():
    return OPTIMIZERS.LossScaleOptimizer(
        adam(global_clipnorm=0.1, use_ema=True)
    )


def with_terms():
    return dense(kernel_constraint="unit_norm", kernel_regularizer="l2")


# What makes a model, and its optimizer; options of the strategy.
CASES = {
    "rows": (functools.partial(dense, 8, 40), adam),
    "sgd": (dense, sgd),
    "norm": (with_terms, with_all),
    "lamb": (dense, functools.partial(OPTIMIZERS.Lamb, 0.01)),
    "adafactor": (dense, functools.partial(OPTIMIZERS.Adafactor, 0.01)),
    "sparse": (functools.partial(of_tokens, 64, 8), sgd),
    "fewer rows than tokens": (functools.partial(of_tokens, 16, 8), adam),
    "columns of a table": (functools.partial(of_tokens, WORDS, 32), adam),
}


@pytest.fixture
def small_slices(monkeypatch):
    """Small weights are in shards, and in slices; return what is scheduled."""
    monkeypatch.setattr(shards, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(sliced_uses, "_LEAST_BYTES", 1)
    monkeypatch.setattr(sliced_uses, "_MOST_SLICES", 3)
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
        if model.inputs[0].dtype == "int32":
            x = y = random.integers(0, WORDS, (15, 5)).astype("int32")
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        else:
            x = random.random((15, *model.input_shape[1:])).astype("float32")
            y = random.random((15, *model.output_shape[1:])).astype("float32")
            loss = "mse"
        model.compile(optimizer(), loss, jit_compile=xla)
        losses = model.fit(x, y, 8, 1, 0, shuffle=False).history["loss"]
    state = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    return [np.array(losses), *state]


trained_by_one = functools.cache(trained)


def in_slices(**options):
    options = {"weights": "sharded", "gather_bytes": 300, **options}
    return kt.TowerStrategy(2, **options)


@pytest.mark.parametrize(
    "options",
    sampling.sample_of(
        [{}, {"remat": True}, {"micro_batches": 2}, {"xla": True}], 4
    ),
    ids=str,
)
def test_a_language_model_in_slices_is_equal(options, small_slices):
    xla = options.get("xla", False)
    options = {key: v for key, v in options.items() if key != "xla"}
    found = trained(language, adam, in_slices(**options), xla)
    assert_all_close(found, trained_by_one(language, adam), 2e-5)
    step, *_ = small_slices
    parts = [e.part for e in step.program.exchanges if e.part is not None]
    assert parts
    types = {o.type for o in step.program.operations}
    # A variable is updated in slices, each as its gradient arrives.
    assert ("DisableCopyOnRead" in types) == (not xla)


@pytest.mark.parametrize("name", sampling.sample_of([*CASES], 8))
def test_slices_give_the_results_of_one_device(name, small_slices):
    make, optimizer = CASES[name]
    found = trained(make, optimizer, in_slices())
    assert_all_close(found, trained(make, optimizer), 2e-5)
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
    trained(dense, sgd, in_slices())
    step, *_ = small_slices
    levels = parts_of(step)
    assert len({*levels["gather"]}) == len(levels["gather"]) > 6
    # The first rows before the last ones have been exchanged.
    assert min(levels["write"]) < max(levels["scatter"])
    # A variable is read when its slices are gathered.
    assert all(e.reads for e in step.program.exchanges if e.part is not None)


def test_a_step_needs_the_less_memory_the_more_slices(
    small_slices, monkeypatch
):
    make, plans = functools.partial(dense, 64, 512), []
    for most in (1, 3, 9):
        monkeypatch.setattr(sliced_uses, "_MOST_SLICES", most)
        del small_slices[:]
        trained(make, sgd, in_slices())
        plans.append(small_slices[0].plan.bytes)
    assert plans[0] > 1.8 * plans[1] > 2.2 * plans[2], plans


def test_what_is_no_larger_than_the_limit_is_whole(small_slices):
    trained(dense, sgd, in_slices(gather_bytes=4096))
    program = small_slices[0].program
    assert not any(exchange.part for exchange in program.exchanges)
    assert not any("slice" in o.suffix for o in program.operations)


def test_predictions_use_slices(small_slices):
    x = np.random.default_rng(0).random((15, 6)).astype("float32")
    found = []
    for strategy in (contextlib.nullcontext(), in_slices()):
        keras.utils.set_random_seed(0)
        with strategy:
            model = dense()
            found.append(model.predict(x, 8, 0))
    np.testing.assert_allclose(*found, 1e-5, 1e-6)
    assert any(e.part for e in small_slices[0].program.exchanges)


def test_products_of_16_bits_use_whole_weights(small_slices):
    make = functools.partial(dense, dtype="mixed_bfloat16")
    trained(make, sgd, in_slices())
    exchanges = small_slices[0].program.exchanges
    gathered = {e.given.shape[-1] for e in exchanges if e.part is not None}
    # The last product has 32 bits; gradients are still exchanged in slices.
    assert gathered == {4}
    assert sum(e.kind == "scatter" for e in exchanges) > 6
