"""The state of a tower during a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import tensorflow as tf

from keras_towers.fit.context.attributes import Attributes
from keras_towers.fit.context.blocks import Slot
from keras_towers.fit.context.rows import Rows
from keras_towers.fit.contract import TakesGradients
from keras_towers.splitting.growing import Growing

if TYPE_CHECKING:
    from keras_towers.fit.weights.spread import SpreadVariables


@dataclasses.dataclass(frozen=True, eq=False)
class Exchanged:
    """The placeholder of a result of an exchange, in the trace of a step."""

    # Its meaning in the analysis: see ``keras_towers.splitting``.
    meaning: str
    # The tensor that it follows from.
    of: tf.Tensor
    shape: tf.TensorShape


Run: TypeAlias = "Callable[[list[tf.Tensor]], list[Any]]"
Exchange: TypeAlias = (
    "Callable[[Sequence[Exchanged], list[tf.Tensor], Run], list[tf.Tensor]]"
)


class MetricUpdate(NamedTuple):
    """A call of a metric's ``update_state``, with the tensors it was given."""

    metric: Any
    tensors: Sequence[tf.Tensor]


@dataclasses.dataclass
class Tower:
    """One tower during a step of ``fit``, ``evaluate``, ..."""

    # Index of this tower, 0 to total - 1.
    index: int
    # Number of towers in all processes.
    total: int
    # Its index among the towers of this process.
    local_index: int = 0
    # Name of the device, without job and task.
    device: str = ""
    # Whether this is a step of ``fit`` or ``train_on_batch``.
    training: bool = False
    # Applies the gradients of the step; None during an update.
    update: TakesGradients | None = None
    # Gives every tower its own component of what the step writes; None: it
    # writes as on one device.
    variables: SpreadVariables | None = None
    # This tower's fraction of the examples of the global batch: a float if
    # known during tracing, else a scalar tensor. None if the tower has its own
    # batch, as on one device.
    share: Any = None
    # False (or a scalar False tensor) if this tower has no examples and
    # computes on a borrowed one, whose results must not count. None if that
    # cannot happen.
    live: Any = None
    # Whether losses are means over the batch (gradients are averaged) or sums
    # (gradients are summed).
    average: bool = True
    # What gradients are multiplied by besides.
    factor: float = 1.0
    # What the step keeps in attributes of Python objects; None: it runs alone,
    # without turns.
    attributes: Attributes | None = None
    # Metrics, with what their ``result`` has returned in the step.
    results: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    # What should be means over the batch: losses and other numbers that the
    # step gives to ``scale_loss`` or to means of batches.
    losses: list[tf.Tensor] = dataclasses.field(default_factory=list)
    # The updates of metrics in the step.
    metric_updates: list[MetricUpdate] = dataclasses.field(default_factory=list)
    # Whether a metric is being updated, or what it consists of.
    updates_metric: bool = False
    # Whether this is Keras's own ``train_step``, which scales one loss and
    # applies its gradients once.
    keras_step: bool = False
    # Whether ``scale_loss`` has weighted the loss of the step. Otherwise
    # gradients are weighted when they are applied.
    loss_is_weighted: bool = False
    # This tower's rows of the global batch, if its random layers draw the rows
    # that one device would draw; else None.
    rows: Rows | None = None
    # Whether values have been exchanged with other towers, through which
    # gradients flow. Their gradients expect unweighted losses.
    mixes: bool = False
    # Whether the other processes run their steps independently.
    apart: bool = False
    # The graph in which the step is traced; None if it runs eagerly.
    graph: Any = None
    # Its part of the batch, as its step gets it.
    data: Any = None
    # What it has been given that is the same on all towers.
    common: list[Any] = dataclasses.field(default_factory=list)
    # What the tensors of its step are.
    values: Growing = dataclasses.field(default_factory=Growing)
    # The generator for draws without a seed, or None: one element, the same
    # list on all towers of this process; None: Keras's own.
    unseeded: list[Any] | None = None
    # What uses this tower's share of the batch only, where one device would use
    # the whole: names by the option that would change that.
    alone: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    # Raises, given the reason, where the trace of the step cannot serve other
    # towers. None: the trace is for this tower.
    shared: Callable[[str], NoReturn] | None = None
    # Raises, given the reason, where the step cannot be cut before its
    # optimizer. None: the step need not be cut.
    cut: Callable[[str], NoReturn] | None = None
    # Notes an exchange of values with other towers in the trace of the step:
    # results, values, and the function that exchanges them when the step runs;
    # returns placeholders of the results. None: values are exchanged at once.
    exchange: Exchange | None = None
    # Reads a ``tf.Variable`` for the step, given a function that does; None:
    # such variables are read as they are.
    reads: Callable[[Any, Callable[[], Any]], Any] | None = None
    # Replaces a loss, given its number; None: losses are taken as they are.
    joins: Callable[[int, tf.Tensor], tf.Tensor] | None = None

    def differs(self, why: str) -> None:
        """Note that the trace of the step cannot serve another tower."""
        if self.shared is not None:
            self.shared(why)

    def note_alone(self, option: str, name: str) -> None:
        """Note an object that uses this tower's share of the batch only."""
        names = self.alone.setdefault(option, [])
        if name not in names:
            names.append(name)

    def is_whole(self, why: str) -> None:
        """Note that the step cannot be cut where its optimizer begins."""
        if self.cut is not None:
            self.cut(why)

    @property
    def loss_weight(self) -> Any:
        """The weight of this tower's loss in that of the global batch."""
        if self.share is None:
            return 1.0
        weight = self.share if self.average else self._only_if_live
        return weight * self.factor

    @property
    def gradient_weight(self) -> Any:
        """The weight of this tower's gradients in those of the global batch."""
        return 1.0 if self.loss_is_weighted else self.loss_weight

    @property
    def _only_if_live(self) -> Any:
        return 1.0 if self.live is None else tf.cast(self.live, tf.float32)

    def note_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Note a loss that should be a mean over the batch, and return it."""
        if self.joins is not None:
            loss = self.joins(len(self.losses), loss)
        self.losses.append(loss)
        return loss

    def weight_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Weight a loss of the step, given to ``scale_loss``."""
        loss = self.note_loss(loss)
        # A scalar is a mean over this tower's examples; of another loss the
        # gradients of all elements are added up.
        is_sum = loss.shape.rank != 0
        if self.keras_step and not self.mixes:
            self.loss_is_weighted = True
            weight = self.loss_weight
            if is_sum:
                weight = self._only_if_live * self.factor
            return loss * tf.cast(weight, loss.dtype)
        if is_sum:
            # Its gradients will be weighted as those of a mean.
            weight = tf.cast(self.loss_weight, loss.dtype)
            return tf.math.divide_no_nan(loss, weight)
        return loss

    def mixed(self, values: Any) -> Any:
        """Prepare values that other towers are about to use."""
        # A gradient through another tower is weighted there, by
        # ``weigh_gradient``, and must not be weighted here again.
        if self._all_weigh_the_same:
            return values
        self.mixes = True
        weight = tf.convert_to_tensor(self.loss_weight)
        return with_gradient_times(
            tf.math.divide_no_nan(tf.ones_like(weight), weight), values
        )

    def weigh_gradient(self, values: Any) -> Any:
        """Weight the gradient of values that come from other towers."""
        if not self._all_weigh_the_same:
            values = with_gradient_times(self.loss_weight, values)
        if not tf.executing_eagerly():
            self.common += tf.nest.flatten(values, expand_composites=True)
            self.values.note_common(values)
        return values

    @property
    def _all_weigh_the_same(self) -> bool:
        if self.share is None or (not self.average and self.live is None):
            return True
        return isinstance(self.share, float) and self.share * self.total == 1

    def count_only_if_live(self, value: Any) -> Any:
        """Return ``value``, or zeros if computed on a borrowed example."""
        if self.live is None:
            return value
        if isinstance(value, tf.IndexedSlices):
            values = self.count_only_if_live(value.values)
            return tf.IndexedSlices(values, value.indices, value.dense_shape)
        return tf.where(self.live, value, tf.zeros_like(value))


_towers: Slot[Tower] = Slot()

# Whether the Keras call that this thread runs without a strategy, as with a
# single tower, trains; None if there is no such call.
training_alone: Slot[bool] = Slot()


def current() -> Tower | None:
    """Return the tower whose step this thread runs or traces, or None."""
    return _towers.get()


def made_current(tower: Tower) -> contextlib.AbstractContextManager[None]:
    """Make a tower the one whose step this thread runs inside a block."""
    return _towers.filled(tower)


def with_a_share() -> Tower | None:
    """Return the current tower if it has a share of a batch, else None."""
    tower = current()
    return None if tower is None or tower.share is None else tower


def exchanged(
    results: Sequence[Exchanged], tensors: list[tf.Tensor], run: Run
) -> list[Any]:
    """Exchange tensors with other towers, or note it in a trace of the step."""
    # ``run`` is called on every tower.
    tower = current()
    if tower is None or tower.exchange is None:
        return run(tensors)
    return tower.exchange(results, tensors, run)


def short_name(device: str) -> str:
    """Return the name of a device without job and task."""
    return device[device.index("/device") :] if "/device" in device else device


def note_first_write() -> None:
    """Note that the step writes a variable that had no components yet."""
    tower = current()
    if tower is not None:
        tower.is_whole("writes a variable that the towers had in common")


def with_gradient_times(factor: Any, values: Any) -> Any:
    """Return the values; their gradient is multiplied by a factor."""

    @tf.custom_gradient
    def identity(value):
        return tf.identity(
            value
        ), lambda grad: grad * tf.cast(factor, grad.dtype)

    return tf.nest.map_structure(
        lambda value: (
            identity(value)
            if isinstance(value, tf.Tensor) and is_differentiable(value)
            else value
        ),
        values,
    )


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor's dtype can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex
