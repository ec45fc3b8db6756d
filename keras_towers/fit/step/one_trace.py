"""One trace of forward and backward pass, called on every tower.

A step is traced on the first tower up to where its optimizer begins, as a
function whose captured variables are inputs. Every tower calls it with its own
variables, and hands the gradients to the optimizer. Where the trace of another
tower might differ, every tower traces the step by itself.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.attributes import Attributes
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.step import differences
from keras_towers.fit.step.differences import Different
from keras_towers.fit.step.tower_trace import TowerTrace

logger = logging.getLogger("keras_towers")

_logged: set[tuple[str, str]] = set()


class OneTrace:
    """The trace of one step, for all towers of this process.

    Args:
        config: the towers.
        model: the model whose step it is.
        attributes: what the step may keep in attributes.
        pieces: the K towers' parts of the batch.
        shares: the K towers' fractions of the batch.

    Attributes:
        shared: whether the first tower's trace is good for all.
    """

    def __init__(
        self,
        config: TowerConfig,
        model: keras.Model,
        attributes: Attributes,
        pieces: Sequence[Any],
        shares: Sequence[Any],
    ):
        self._config = config
        self._model = model
        self._attributes = attributes
        self._pieces = pieces
        self._shares = shares
        self._trace: TowerTrace | None = None

    @property
    def shared(self) -> bool:
        return self._trace is not None

    def run(
        self,
        step: Callable[[Any], Any],
        data: Any,
        tower: tower_lib.Tower,
        note: Callable[[Any, Any], None] | None = None,
    ) -> Any:
        """Run the step on a tower, which is the current one.

        Args:
            step: takes a tower's part of the batch.
            data: the tower's part.
            tower: the tower. The first comes first.
            note: called with the step's output and the results of metrics,
                where the first tower's step is traced.

        Returns:
            What the step returns.
        """
        first = tower.local_index == 0
        if first and self._config.num_towers > 1 and not tf.executing_eagerly():
            self._trace_on(tower, step, data, note)
        if self._trace is not None:
            return self._trace(data, tower)
        output = step(data)
        if first and note is not None:
            note(output, tower.results)
        return output

    def _trace_on(
        self,
        tower: tower_lib.Tower,
        step: Callable[[Any], Any],
        data: Any,
        note: Callable[[Any, Any], None] | None,
    ) -> None:
        before = self._attributes.take()
        draws = random.getstate(), np.random.get_state()
        try:
            self._check()
            trace = TowerTrace(self._config, step, tower, data, note)
            if self._attributes.hold_tensors_of(trace.graph):
                raise Different("keeps tensors in attributes")
            self._trace = trace
        except Different as error:
            self._log(str(error))
        except Exception as error:
            # If it is the step's own, it is raised again without the trace.
            self._log(f"fails in a function ({type(error).__name__}: {error})")
        finally:
            if self._trace is None:
                self._attributes.put(before)
                random.setstate(draws[0])
                np.random.set_state(draws[1])

    def _check(self) -> None:
        if self._config.random == "global":
            raise Different("draws its own rows of random numbers")
        if not devices.all_on_host(self._config.devices):
            raise Different("runs on other devices than CPUs")
        if self._config.transport.size > 1:
            # A call returns all gradients at once, at its end.
            raise Different("exchanges gradients while it computes others")
        if not all(layer.built for layer in compat.layers_of(self._model)):
            raise Different("has layers that are not built yet")
        differences.check_parts(self._pieces, self._shares)

    def _log(self, why: str) -> None:
        if (self._model.name, why) not in _logged:
            _logged.add((self._model.name, why))
            logger.info(
                "every tower traces the step of %r by itself, because it %s",
                self._model.name,
                why,
            )
