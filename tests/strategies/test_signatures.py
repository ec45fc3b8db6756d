"""Constructors are read as they are."""

import inspect
from typing import get_args

import pytest

import keras_towers as kt
from keras_towers.strategies import STRATEGIES
from keras_towers.strategies.signatures import hints_of

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_read_is_the_signature(name):
    kind = STRATEGIES[name].kind
    strategy = getattr(kt, kind)
    parameters = inspect.signature(strategy).parameters
    wanted = {n: p.annotation for n, p in parameters.items() if n != "options"}
    if "options" in parameters:
        hints = inspect.get_annotations(strategy.__init__, eval_str=True)
        (keywords,) = get_args(hints["options"])
        wanted |= dict.fromkeys(keywords.__annotations__, "")
    assert hints_of(kind) == wanted
