"""Rows of a tower, known to its random draws.

The number of a tower's rows is hidden from static shapes, so that every
dimension that has it can be followed. A step that needs a static number
(``x.shape[0]``) cannot be traced like that: it is traced once more, with static
shapes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.rows import Rows
from keras_towers.fit.data import batches as data_lib

logger = logging.getLogger("keras_towers")


def hide_rows(tower: tower_lib.Tower, data: Any) -> Any:
    """Return a tower's data for its own trace, without a number of rows."""
    if tower.rows is None or tower.rows.static is not None:
        return data
    tower.data = tower.rows.mark(data)
    tower.values.note_batch(tower.data)
    return tower.data


class HiddenRows:
    """Hides the numbers of rows from the steps of all models that allow it."""

    def __init__(self):
        self._shown: weakref.WeakSet[Any] = weakref.WeakSet()
        self._failed = False

    def know(
        self,
        tower: tower_lib.Tower,
        model: keras.Model,
        data: Any,
        start: Any,
        total: Any,
    ) -> None:
        """Tell a tower its rows."""
        eager = tf.executing_eagerly()
        static = data_lib.static_size(data)
        shown = not eager and model in self._shown
        tower.rows = Rows(
            start=start,
            count=tf.cast(data_lib.batch_size_of(data), tf.int64),
            total=tf.cast(total, tf.int64),
            graph=None if eager else compat.get_default_graph(),
            static=static if shown else None,
        )

    @contextlib.contextmanager
    def tried(self, model: keras.Model, batch: Any) -> Iterator[None]:
        """Notice where a step cannot be traced with hidden numbers of rows."""
        try:
            yield
        except TowerError:
            raise
        except Exception:
            self._failed = (
                not tf.executing_eagerly()
                and model not in self._shown
                and data_lib.static_size(batch) is not None
            )
            raise

    def retrying(
        self, model: keras.Model, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that traces a model's steps again, if need be."""
        model_of = weakref.ref(model)

        def run(data: Any) -> Any:
            self._failed = False
            again = data
            if isinstance(data, GeneratorType):
                # Of a single batch, which it gives only once.
                data, again = itertools.tee(data)
            try:
                return function(data)
            except Exception as error:
                model = model_of()
                if not self._failed or model is None:
                    raise
                logger.info(
                    "the step of %r is traced with static numbers of rows, "
                    "because it fails without (%s)",
                    model.name,
                    error,
                )
                self._shown.add(model)
            return function(again)

        return run
