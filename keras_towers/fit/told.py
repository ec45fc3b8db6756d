"""Telling the user, once, where results differ from those of one device."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from keras_towers._notices import announce
from keras_towers._strategy import Strategy
from keras_towers.fit.contract import KerasStrategy, TowerConfig

logger = logging.getLogger("keras_towers")

About: TypeAlias = Literal[
    "batch-norm", "couples", "random", "state", "plain-variable", "log", "rows"
]
"""What differs."""


class Told(NamedTuple):
    """One thing that differs, or may differ."""

    about: About
    subject: str | tf.Variable
    message: str


_said: set[Hashable] = set()
_heard: list[Told] | None = None


def differs(
    about: About,
    subject: str | tf.Variable,
    message: str,
    once: Hashable | None = None,
) -> None:
    """Warn that something differs from one device, or may."""
    # Without a key for ``once`` it is told every time.
    if _heard is not None:
        _heard.append(Told(about, subject, message))
    elif once is None or is_news(once):
        logger.warning("%s", message)


def is_news(key: Hashable) -> bool:
    """Whether a message is new, by its key; note the key."""
    # Not where steps run only to hear what there is to tell.
    if _heard is not None or key in _said:
        return False
    _said.add(key)
    return True


@contextlib.contextmanager
def heard() -> Iterator[list[Told]]:
    """Collect the differences in a block, also those told before."""
    global _heard
    before, _heard = _heard, []
    try:
        yield _heard
    finally:
        _heard = before


_not_reduced: weakref.WeakSet[KerasStrategy] = weakref.WeakSet()


def warn_not_reduced(strategy: KerasStrategy) -> None:
    """Warn, once, where a step joins the values of one worker's towers only."""
    config = strategy._components.config
    joined = config.peers.size == config.transport.size
    if joined or config.batches == "each" or strategy in _not_reduced:
        return
    _not_reduced.add(strategy)
    differs(
        "couples",
        "the step",
        "the step joins values of the whole batch (for a mask, for sample "
        "weights in a denominator, for synchronized BatchNormalization or by "
        f"kt.gather), but workers with {config.name} join those of their own "
        "part of it only: weights will differ a little from those of one "
        "device. "
        "HorovodStrategy and MultiWorkerTowerStrategy join all.",
    )


_OWN_SHARE: dict[str, tuple[About, str]] = {
    "batch_norm": (
        "batch-norm",
        "BatchNormalization ({}) takes the statistics of each tower's share of "
        "the batch",
    ),
    "random": ("random", "{} draw from a stream of each tower's own"),
}


own_shares: weakref.WeakKeyDictionary[Strategy, dict[str, str]] = (
    weakref.WeakKeyDictionary()
)
"""What towers do with their own share, by the names of a strategy's steps."""


def tell_own_share(
    config: TowerConfig,
    model: keras.Model,
    alone: Mapping[str, Sequence[str]],
) -> None:
    """Tell once, as training begins, how one device would train otherwise."""
    chosen = {"batch_norm": config.batch_norm, "random": config.random}
    found = [
        Told(about, _named(alone[option]), said.format(_named(alone[option])))
        for option, (about, said) in _OWN_SHARE.items()
        if chosen[option] == "tower" and option in alone
    ]
    # Towers with batches of their own are not compared with one device.
    if not found or config.batches == "each":
        return
    why = ", and ".join(one.message for one in found)
    why += ". exact=True makes that equal."
    step = f"the training step of {model.name!r}"
    own_shares.setdefault(config.strategy, {})[step] = why
    if config.peers.rank:
        return
    if _heard is not None:
        _heard.extend(found)
    if is_news(("own share", model.name, why)):
        announce(
            f"{config.name}: {model.name!r} does not train as on one device: "
            f"{why}"
        )


def _named(names: Sequence[str]) -> str:
    listed = ", ".join(names[:3])
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed
