"""Every case of the contract, on every synchronous strategy of one process.

`make test` has the hardest cases on towers, and draws some of the others by a
seed; `make test-all` has all of them.
"""

import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.cases import (
    CASES,
    HARDEST,
    OVERFLOW,
)
from tests.exactness.contract import assert_contract
from tests.exactness.ways import MOST_UNLIKE, WAYS as WAYS_OF_ALL
from tests.kit.compare import (
    assert_exact,
    assert_same_model,
    assert_towers_equal,
)
from tests.kit.memory import without_room
from tests.kit.meshes import on_a_mesh
from tests.kit.sampling import sample_of
from tests.kit.training import classifier, compiled, fit


def _on_a_mesh(name, towers, **options):
    # Keras counts the names of the model that is trained from 0, too.
    keras.backend.clear_session()
    weights = CASES[name].build().variables
    keras.backend.clear_session()
    return on_a_mesh(weights, towers, **options)


PACKER = kt.GradientPacker(num_split=2, min_elements=2)
MODES = ("nccl", "collective", "hierarchical", "towers", "host")
# Each does something of its own to a model or its step: they have all cases.
WAYS = {
    "towers": kt.TowerStrategy,
    "each": functools.partial(kt.TowerStrategy, updates="each"),
    **{
        way.strip(): functools.partial(kt.TowerStrategy, **options)
        for way, options in WAYS_OF_ALL.items()
        if way
    },
    # Of the weights of a case.
    "mesh": None,
    "served": kt.ParameterServerTowerStrategy,
    # Each update is of the gradients of two batches.
    "replicas": lambda towers: kt.SyncReplicasStrategy(towers=2),
}
# These only exchange in another way, or do two of those at once: they have the
# cases that differ most.
VARIED = {
    # As towers with memories of their own, which gather weights again.
    "weights gathered twice": functools.partial(
        kt.TowerStrategy, weights="sharded", updates="each", gather_bytes=2000
    ),
    **{
        f"weights in shards, {mode}": functools.partial(
            kt.TowerStrategy, weights="sharded", mode=mode, packer=PACKER
        )
        for mode in ("collective", "hierarchical", "towers")
    },
    "in shards, computed again": functools.partial(
        kt.TowerStrategy, weights="sharded", remat=True, gather_bytes=2000
    ),
    "in micro-batches, computed again": functools.partial(
        kt.TowerStrategy, micro_batches=3, remat=True
    ),
    "in shares, collective": functools.partial(
        kt.TowerStrategy, updates="sharded", mode="collective", packer=PACKER
    ),
    # Whatever saves memory.
    "smallest": lambda towers: without_room(kt.TowerStrategy(towers)),
    "smallest from the first step on": lambda towers: without_room(
        kt.TowerStrategy(towers), begins_whole=True
    ),
    "mesh, collective": None,
    **{m: functools.partial(kt.TowerStrategy, mode=m) for m in MODES},
    "served by all": lambda towers: kt.ParameterServerTowerStrategy(
        towers, ps_device="towers"
    ),
}
DRAWN = 40
# Two batches of replicas are one of one device only where a loss is a mean over
# the examples of a batch, and batches are of the same size. And replicas
# refuse eager steps.
NOT_OF_REPLICAS = (
    *("odd-batches", "validation", "several-losses", "sync-batch-norm"),
    *("regularizers", "mask", "contrastive", "eager", "draws"),
    # A step begins with its first batch, or skips one.
    *("counting-python", "loss-scale-of-own-step"),
)
# A step is traced again once its variables are in shards.
NOT_OF = {
    "replicas": NOT_OF_REPLICAS,
    "smallest from the first step on": ["counting-python"],
}


def _cases():
    """The hardest on towers, half of what no other shows, and a few drawn."""
    core = [pytest.mark.core, pytest.mark.optimized]
    first = [(name, "towers", 3) for name in HARDEST]
    kept = [
        # Groups of several towers, some of which have no example in the end.
        ("uneven", "hierarchical", 8),
        # Eager steps run as on one device, with copies on other towers.
        *(("eager", way, 2) for way in ("each", "in shares")),
        # Several optimizers, and a scale that all of them read.
        *((name, "in shares", 2) for name in ("gan", "loss-scale-overflow")),
        ("wide", "with weights in shards", 3),
        ("uneven", "weights in shards, collective", 3),
        ("embedding-clipped", "weights in shards, hierarchical", 4),
        ("sync-batch-norm", "in shares, collective", 2),
        ("embedding-clipped", "mesh, collective", 2),
        *((name, "weights gathered twice", 2) for name in HARDEST),
        *((name, "mesh", 2) for name in ("embedding-clipped", "gan")),
        *((name, "computed again", 2) for name in HARDEST),
        *(
            (name, "smallest from the first step on", 2)
            for name in ("wide", "gan", "uneven", "loss-scale-of-own-step")
        ),
        ("embedding-clipped", "smallest", 3),
        *(
            (name, way, 2)
            for name in ("counting-python", "loss-scale-of-own-step")
            for way in ("towers", "each", "with weights in shards", "mesh")
        ),
        ("sync-batch-norm", "in shards, computed again", 2),
    ]
    every = [
        *((name, "towers", towers) for name in HARDEST for towers in (1, 8)),
        *(
            (name, way, 3 if way == "towers" else 2)
            for ways, names in ((WAYS, CASES), (VARIED, MOST_UNLIKE))
            for name in names
            for way in ways
            if name not in NOT_OF.get(way, ())
        ),
    ]
    rest = [case for case in every if case not in (*first, *kept)]
    return [
        *(pytest.param(*case, marks=core) for case in first),
        *sample_of(kept),
        *sample_of(rest, DRAWN),
    ]


@pytest.mark.parametrize("name, way, towers", _cases())
def test_case(name, way, towers, small_shards):
    parts = 2 if way == "replicas" else 1
    # Compiling takes longer than a step of these.
    xla = way in ("towers", "served")
    options = {"mode": "collective", "packer": PACKER}
    if way == "mesh":
        options = {}
    make = {**WAYS, **VARIED}[way] or functools.partial(
        _on_a_mesh, name, **options
    )
    strategy = make(towers)
    assert_contract(name, strategy, parts, xla)
    if "weights" in way or way.startswith("mesh"):
        assert "weights: " in strategy.describe()
    if way.startswith("in shares"):
        assert "its share of the weights" in strategy.describe()


@pytest.mark.parametrize(
    "name, replicas", [("embedding-clipped", 2), ("loss-scale-overflow", 1)]
)
def test_four_gradients_an_update(name, replicas):
    # A whole number of updates takes all examples.
    assert_contract(
        name,
        kt.SyncReplicasStrategy(
            replicas_to_aggregate=4, total_num_replicas=replicas
        ),
        4,
        xla=False,
    )


def test_training_ends_at_a_loss_that_is_no_number():
    ends = keras.callbacks.TerminateOnNaN()
    found = assert_exact(
        compiled(),
        lambda model: fit(model, x=OVERFLOW, y=m.LABELS, callbacks=[ends]),
        kt.TowerStrategy(2),
    )
    assert found.model.optimizer.iterations.numpy() == 2


def test_differences_are_caught():
    model, wanted = classifier(), classifier()
    strategy = kt.TowerStrategy(2, updates="each")
    assert_same_model(model, wanted)
    kernel = model.trainable_variables[0]
    with strategy:
        strategy.adopt(model)
        assert_towers_equal(model)
        component = kernel._value.values[1]
        component.assign(component + np.float32(1e-7))
        with pytest.raises(AssertionError, match="tower 1"):
            assert_towers_equal(model)
    kernel.assign(kernel + 1e-5 * keras.ops.eye(*kernel.shape))
    with pytest.raises(AssertionError, match="kernel"):
        assert_same_model(model, wanted)
