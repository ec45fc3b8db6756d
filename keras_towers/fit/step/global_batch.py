"""One global batch on all towers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import told
from keras_towers.fit.capture.judging import Judge, Pending, rehearse
from keras_towers.fit.capture.sharing import StepTraces
from keras_towers.fit.context import marks, replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.attributes import Attributes
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.data.ranks import SameBatches
from keras_towers.fit.data.rows import RowCheck
from keras_towers.fit.step import drawn, draws
from keras_towers.fit.step.hidden import HiddenRows
from keras_towers.fit.step.logs import Logs, Results
from keras_towers.fit.update.order import StepOrder
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.weights import trainers
from keras_towers.meeting import watch

# What draws without a seed take it from.
_UNSEEDED = "global_seed_generator"


class GlobalStep:
    """Runs steps on all towers as if they were one device."""

    def __init__(self, update: UpdateOnce, config: TowerConfig | None = None):
        self.order: StepOrder = update.order
        self.rows: RowCheck = RowCheck()
        self.hidden: HiddenRows | None = None
        self._later: list[Pending] = []
        self.config: TowerConfig = config or update.config
        self.update = update
        self._spread = update.spread
        if self.config.random == "global":
            self.hidden = HiddenRows()
        self._devices = [tower_lib.short_name(d) for d in self.config.devices]
        self.same: SameBatches | None = None
        if self.config.transport.size > 1 and self.config.batches == "split":
            self.same = SameBatches(self.config.transport)

    def begin_epoch(self) -> None:
        """Note that the next step begins to read data."""
        if self.same is not None:
            self.same.begin()

    def has_run(self) -> None:
        """Note that a step has ended."""
        if self._later:
            waiting, self._later[:] = list(self._later), []
            rehearse(waiting)

    def alone(self) -> GlobalStep:
        """Return steps without the processes that train with this one."""
        return GlobalStep(self.update, self.config.alone())

    def predict(
        self, step: Callable[[Any], Any], batch: Any, model: keras.Model
    ) -> Any:
        """Run a step that returns outputs of shape [examples, ...]."""
        batch = self._begin(batch, counts_ranks=False)
        together = self.config.batches == "split"
        outputs = self._outputs(step, batch, model, apart=not together)
        result = _in_order(outputs, batch)
        if together:
            result = self.order.gather(result)
        return self.order.end(result)

    def run(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        logs: Logs,
    ) -> Any:
        """Run a step that trains or evaluates."""
        averages = self._averages(logs.training)
        batch = self._begin(batch, counts_ranks=True, alone=averages)
        if averages:
            begin = functools.partial(self._spread.begin_batch, batch.parts)
            self.order.first(begin)
        outputs = self._outputs(
            step, batch, logs.model, logs.training, note=logs.note
        )
        last = None
        if self._averages(logs.training):
            end = self._spread.shares.end_step
            last = functools.partial(end, batch.parts)
            if not averages:
                # Only this trace has shown it. It may do for one step, before
                # which all towers have the same.
                _trace_again()
        return self.order.end(
            logs.of_batch(outputs, self._of_logs(batch)), last
        )

    def _of_logs(self, batch: data_lib.TowerBatch) -> list[Any]:
        """Each tower's fraction of the examples that the logs are of."""
        shares = _shares(batch)
        if self.config.others is None:
            return shares
        here = tf.add_n([tf.convert_to_tensor(share) for share in shares])
        return [tf.math.divide_no_nan(share, here) for share in shares]

    def _averages(self, training: bool) -> bool:
        """Whether towers write means, which their shares have to weight."""
        return (
            training
            and self.config.batches == "split"
            and self._spread.may_be_written()
        )

    def _begin(
        self, batch: Any, counts_ranks: bool, alone: bool = False
    ) -> data_lib.TowerBatch:
        given = batch
        batch = data_lib.as_tower_batch(self.config, given, self.rows)
        batch = self.order.begin(batch, alone)
        if self.same is not None and data_lib.is_whole(given):
            check = functools.partial(self.same.check, given)
            batch = self.order.behind(check, batch)
        return self._with_total(batch, counts_ranks)

    def _outputs(
        self,
        step: Callable[[Any], Any],
        batch: data_lib.TowerBatch,
        model: keras.Model,
        training: bool = False,
        apart: bool = False,
        note: Callable[[Any, Results], None] | None = None,
    ) -> list[Any]:
        """Run the step on each tower of this process; return K results."""
        shares = _shares(batch)
        factor = self.config.gradient_factor
        if training and self.update.rounds is not None:
            factor = self.update.rounds.begin_step(sum(shares))
        live = None
        if not isinstance(batch.counts, tuple):
            live = [count > 0 for count in _counts(batch)]
        # Keras has one for each thread, and towers have threads.
        unseeded = [compat.get_global_attribute(_UNSEEDED)]
        eager, one_draw = tf.executing_eagerly(), self.config.random == "global"
        starts = _starts(batch) if one_draw else None
        attributes = Attributes(model, not eager or one_draw)
        before = after = attributes.take()
        given = self.config, self.update, model, attributes
        begins = self.order.begins_a_call()
        judge = Judge(
            *(self.config, model, begins, self._later), predicts=note is None
        )
        traces = StepTraces(*given, batch.pieces, shares, judge)

        def tower_step(index: int, data: Any) -> Any:
            nonlocal after
            attributes.put(before)
            tower = tower_lib.Tower(
                index=self.config.first_tower + index,
                total=self.config.num_replicas,
                local_index=index,
                device=self._devices[index],
                training=training,
                update=self.update,
                variables=self._spread,
                share=shares[index],
                live=None if live is None else live[index],
                average=self.config.average,
                factor=factor,
                attributes=attributes,
                unseeded=unseeded,
                keras_step=trainers.has_keras_step(model),
                apart=apart and self.config.transport.size > 1,
            )
            if starts is not None and self.hidden is not None:
                start = starts[index]
                self.hidden.know(tower, model, data, start, batch.total)
            tower.data = data
            tower.values.note_batch(data)
            tells = training and index == 0 and not one_draw
            with (
                replica_context.activate(tower),
                self.order.gated(),
                drawn.noted(tower) if tells else contextlib.nullcontext(),
            ):
                output = traces.run(step, data, tower, note)
            if index == 0:
                after = attributes.take()
                if training:
                    told.tell_own_share(self.config, model, tower.alone)
            return output

        towers = range(self.config.num_towers)
        recorded = model if training else None
        nothing = contextlib.nullcontext()
        tried: Any = nothing
        if self.hidden is not None:
            tried = self.hidden.tried(model, batch.pieces)
        with (
            tried,
            draws.replaced() if eager or one_draw else nothing,
            nothing if eager else watch.preparing(),
            self.order.step(),
            marks.marked(recorded, self.config.devices, batch.pieces),
        ):
            outputs = self.config.strategy.run(
                tower_step,
                args=(
                    compat.PerReplica(towers),
                    compat.regroup(batch.pieces, always_wrap=True),
                ),
            )
        if self._spread is not None and self._spread.finish_step():
            _trace_again()
        attributes.put(after)
        compat.set_global_attribute(_UNSEEDED, unseeded[0])
        return [compat.select_replica(index, outputs) for index in towers]

    def _with_total(
        self, batch: data_lib.TowerBatch, counts_ranks: bool
    ) -> data_lib.TowerBatch:
        """Count the examples of all towers if the total is unknown."""
        if not (isinstance(batch.total, tuple) and batch.total == ()):
            return batch
        counts = _counts(batch)
        if all(isinstance(count, int) for count in counts):
            here = sum(counts)
        else:
            here = tf.add_n([tf.cast(count, tf.int64) for count in counts])
        if not counts_ranks or self.config.transport.size == 1:
            # Outputs need only the number of examples in this process.
            return batch._replace(total=here, start=0)
        return self.order.count(batch, here)


def _trace_again() -> None:
    """Have the step traced again before it runs."""
    if not tf.executing_eagerly():
        try:
            compat.make_function_trace_again()
        except ValueError:
            told.differs(
                "state",
                "the step",
                "only in a later trace, such as for a batch of another size, "
                "the step writes a variable by itself. Its values may mix "
                "wrongly: write it in every step.",
            )


def _counts(batch: data_lib.TowerBatch) -> list[Any]:
    """Number of real examples per tower: ints or scalar tensors."""
    if isinstance(batch.counts, tuple):
        return [data_lib.batch_size_of(piece) for piece in batch.pieces]
    return tf.unstack(batch.counts, num=len(batch.pieces))


def _starts(batch: data_lib.TowerBatch) -> list[Any]:
    """Index of each tower's first example in the global batch."""
    start = 0 if isinstance(batch.start, tuple) else batch.start
    start = tf.cast(start, tf.int64)
    counts = [tf.cast(count, tf.int64) for count in _counts(batch)]
    return [start + sum(counts[:k]) for k in range(len(counts))]


def _shares(batch: data_lib.TowerBatch) -> list[Any]:
    """Each tower's fraction of the global batch; 1 in total."""
    counts = _counts(batch)
    if all(isinstance(count, int) for count in (*counts, batch.total)):
        return [count / batch.total for count in counts]
    # A batch without examples has a loss and gradients of zero.
    total = tf.cast(batch.total, tf.float32)
    return [
        tf.math.divide_no_nan(tf.cast(count, tf.float32), total)
        for count in counts
    ]


def _in_order(outputs: Sequence[Any], batch: data_lib.TowerBatch) -> Any:
    """Concatenate the towers' outputs, dropping borrowed examples."""
    if not isinstance(batch.counts, tuple):
        counts = _counts(batch)
        outputs = [
            tf.nest.map_structure(
                lambda t, n=count: data_lib.rows_if(t, n > 0), output
            )
            for output, count in zip(outputs, counts, strict=True)
        ]
    return tf.nest.map_structure(
        lambda *tensors: data_lib.concatenate(tensors), *outputs
    )
