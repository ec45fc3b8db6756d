"""Whole training steps: what one device does, laid out over three towers.

One of the towers has no examples. `make test` draws some of the steps and of
Keras's classes by a seed; `make test-all` has all of them.
"""

import contextlib

import pytest

from tests.exactness.classes import groups, listed
from tests.exactness.classes import loss_recipes as of_losses
from tests.exactness.classes.layer_recipes import LAYERS
from tests.kit.long import some_of
from tests.partition.steps import laid_out
from tests.splitting.cases import CASES
from tests.splitting.trial import TOLERANCE, between, trained

DRAWN = 45
GROUP = 12

# TensorFlow numbers its stateful draws by the operations of the function that
# one device traces, which is another here.
STATEFUL_DRAWS = ("noise_for_every_example", "shuffled_targets")
_STEPS = [name for name in CASES if name not in STATEFUL_DRAWS]


@pytest.mark.parametrize("name", some_of(_STEPS, DRAWN))
def test_a_step_is_that_of_one_device(name):
    case, made = CASES[name], []
    one = trained(case, contextlib.nullcontext())
    many = trained(case, laid_out(made))
    assert made
    assert one.keys() == many.keys()
    off = {key: between(one[key], many[key]) for key in one}
    assert max(off.values()) <= TOLERANCE, off


# What there is of each class to be tried.
_PARTS = {
    "layers": LAYERS,
    "losses": {
        key: recipe
        for name in of_losses.LOSSES
        for key, recipe in of_losses.loss_recipes(name).items()
    },
    "metrics": {
        key: recipe
        for name in (*of_losses.METRICS, *of_losses.VALUES)
        for key, recipe in of_losses.metric_recipes(name).items()
    },
}


def _groups():
    """Some parts of a kind each, which are trained as one model."""
    for kind, parts in _PARTS.items():
        names = [name for name in parts if name not in listed.TOLD]
        for start in range(0, len(names), GROUP):
            yield kind, names[start : start + GROUP]


@pytest.mark.parametrize(
    ("kind", "names"), some_of(_groups(), DRAWN), ids=lambda v: str(v)[:60]
)
def test_keras_classes_are_those_of_one_device(kind, names):
    parts = {name: _PARTS[kind][name] for name in names}
    made = []
    different, _ = groups.compared(parts, groups.of_recipes, laid_out(made))
    assert made
    assert not different
