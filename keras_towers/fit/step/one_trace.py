"""One trace of forward and backward pass, called on every tower.

A step is traced on the first tower up to where its optimizer begins, as a
function whose captured variables are inputs. Every tower calls it with its own
variables, and hands the gradients to the optimizer. Where the trace of another
tower might differ, every tower traces the step by itself.

With ``jit_compile`` XLA compiles this function, which uses one device only.
Every tower then has one, be it its own, where the step can be cut there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers.fit import told
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.attributes import Attributes
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.step import differences
from keras_towers.fit.step.differences import Different, Whole
from keras_towers.fit.step.tower_trace import TowerTrace
from keras_towers.fit.step.xla import Uncompilable
from keras_towers.fit.weights import trainers

logger = logging.getLogger("keras_towers")

# What holds for the first trace of a step only: another follows.
_FOR_NOW = frozenset(
    (
        "creates variables",
        "writes a variable that the towers had in common",
    )
)


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
        self._compiles: bool = bool(model.jit_compile)

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
        note = note if first else None
        trace = self._trace
        if trace is None and not tf.executing_eagerly():
            if self._compiles:
                trace = self._compiled(tower, step, data, note)
            if trace is None and first and self._config.num_towers > 1:
                self._trace = trace = self._shared(tower, step, data, note)
        if trace is not None:
            return trace(data, tower)
        output = step(data)
        if note is not None:
            note(output, tower.results)
        return output

    def _shared(self, *given: Any) -> TowerTrace | None:
        """Return a trace for all towers, unless there may be differences."""
        try:
            self._check()
            return self._traced(*given)
        except Different as error:
            self._log_own_traces(error)
            return None

    def _compiled(
        self, tower: tower_lib.Tower, *given: Any
    ) -> TowerTrace | None:
        """Return a trace that XLA compiles: for all towers, or this one."""
        try:
            self._check_cut()
            if tower.local_index == 0 and self._config.num_towers > 1:
                try:
                    differences.check_parts(self._pieces, self._shares)
                    self._trace = self._traced(tower, *given, xla=True)
                    return self._trace
                except Whole:
                    raise
                except Different as error:
                    self._log_own_traces(error)
            return self._traced(tower, *given, shared=False, xla=True)
        except (Different, Uncompilable) as error:
            self._compiles = False
            why = str(error)
            trainers.log_without_xla(
                *(self._model, tower.training, f"the step {why}"),
                for_now=why in _FOR_NOW,
            )
            return None

    def _traced(
        self,
        tower: tower_lib.Tower,
        step: Callable[[Any], Any],
        data: Any,
        note: Callable[[Any, Any], None] | None,
        **options: bool,
    ) -> TowerTrace:
        """Trace the step; if it cannot be, leave everything as it was."""
        before = self._attributes.take()
        try:
            trace = TowerTrace(self._config, step, tower, data, note, **options)
            if self._attributes.hold_tensors_of(trace.graph):
                raise Whole("keeps tensors in attributes")
            return trace
        except BaseException as error:
            self._attributes.put(before)
            own = not isinstance(error, (Different, Uncompilable))
            if own and isinstance(error, Exception):
                # If it is the step's, it is raised again without the trace.
                name = type(error).__name__
                raise Whole(f"fails in a function ({name}: {error})") from error
            raise

    def _check(self) -> None:
        """Check for differences that are known before the step is traced."""
        self._check_cut()
        if not all(layer.built for layer in compat.layers_of(self._model)):
            raise Different("has layers that are not built yet")
        if not devices.all_on_host(self._config.devices):
            raise Different("runs on other devices than CPUs")
        if self._config.transport.size > 1:
            # A call returns all gradients at once, at its end.
            raise Different("exchanges gradients while it computes others")
        differences.check_parts(self._pieces, self._shares)

    def _check_cut(self) -> None:
        if self._config.random == "global":
            raise Whole("draws its own rows of random numbers")

    def _log_own_traces(self, error: Different) -> None:
        why = str(error)
        if told.is_news(("own traces", self._model.name, why)):
            logger.info(
                "every tower traces the step of %r by itself, because it %s",
                self._model.name,
                why,
            )
