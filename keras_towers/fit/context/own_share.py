"""Telling what a tower computes from its own share of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras

from keras_towers._notices import announce
from keras_towers.fit import told
from keras_towers.fit.contract import TowerConfig

_SAID = {
    "batch_norm": (
        "BatchNormalization ({}) takes the statistics of each tower's share of "
        "the batch"
    ),
    "random": "{} draw from a stream of each tower's own",
}


def tell(
    config: TowerConfig,
    model: keras.Model,
    alone: Mapping[str, Sequence[str]],
) -> None:
    """Say once, as training begins, what one device would do otherwise.

    Args:
        config: the towers.
        model: the model whose step was run, or traced.
        alone: the names of layers by option; see ``Tower.alone``.
    """
    chosen = {"batch_norm": config.batch_norm, "random": config.random}
    reasons = [
        said.format(_named(alone[option]))
        for option, said in _SAID.items()
        if chosen[option] == "tower" and option in alone
    ]
    # Towers with batches of their own are not compared with one device.
    if not reasons or config.batches == "each" or config.peers.rank:
        return
    if told.is_news(("own share", model.name, *reasons)):
        announce(
            f"{config.name}: {model.name!r} does not train as on one device: "
            f"{', and '.join(reasons)}. exact=True makes that equal."
        )


def _named(names: Sequence[str]) -> str:
    listed = ", ".join(names[:3])
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed
