"""What users give to functions that both drop-ins have."""

from __future__ import annotations

from typing import Any, NoReturn

import keras

from keras_towers import compat
from keras_towers.dropin import wrapping
from keras_towers.dropin.passes import Passes
from keras_towers.errors import TowerError


def plain(variable: Any) -> Any:
    """Return the ``tf.Variable`` inside a Keras variable."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return variable


def check_optimizer(optimizer: Any, called: str) -> None:
    """Check that an optimizer can be made a distributed one.

    Args:
        optimizer: what was given.
        called: what the user calls the drop-in.

    Raises:
        TowerError: it is none of Keras 3, or is distributed already.
    """
    if not isinstance(optimizer, compat.BaseOptimizer):
        raise TowerError(
            f"{called}.DistributedOptimizer takes an optimizer of Keras 3, "
            f"such as keras.optimizers.SGD(0.1), and got {optimizer!r}."
        )
    inner = optimizer
    while inner is not None:
        if wrapping.distribution_of(inner) is not None:
            raise TowerError(
                f"the optimizer {inner.name!r} is already distributed: call "
                f"{called}.DistributedOptimizer only once per optimizer."
            )
        inner = getattr(inner, "inner_optimizer", None)


def check_compression(compression: Any, called: str) -> None:
    """Check that an object can compress.

    Args:
        compression: what was given.
        called: what the user calls the drop-in.

    Raises:
        TowerError: it cannot.
    """
    if not all(
        callable(getattr(compression, method, None))
        for method in ("compress", "decompress")
    ):
        raise TowerError(
            f"compression is {compression!r}, which cannot compress and "
            f"decompress. Give {called}.Compression.none or "
            f"{called}.Compression.fp16."
        )


def passes_of(number: Any, average: bool) -> Passes | None:
    """What sums so many backward passes, None for one.

    Args:
        number: what was given as ``backward_passes_per_step``.
        average: update with the mean over the passes instead of the sum.

    Raises:
        TowerError: there is no such number of passes.
    """
    if not isinstance(number, int) or number < 1:
        raise TowerError(
            f"backward_passes_per_step is {number!r}: give 1 or more."
        )
    return Passes(number, average) if number > 1 else None


def refuse_global_variables(called: str, root_rank: Any) -> NoReturn:
    """Say what to do instead of broadcasting global variables.

    Args:
        called: what the user calls the drop-in.
        root_rank: the rank whose values were wanted.

    Raises:
        TowerError: always.
    """
    raise TowerError(
        f"broadcast_global_variables({root_rank}) is not possible: "
        "TensorFlow 2 keeps no list of all variables. Name them: "
        f"{called}.broadcast_variables(model.weights + "
        f"model.optimizer.variables, root_rank={root_rank}). In fit, use "
        f"callbacks=[{called}.callbacks."
        f"BroadcastGlobalVariablesCallback({root_rank})]."
    )
