"""Merging per-tower logs into those that one device would return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.step import whole_metrics
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport

Results: TypeAlias = "Sequence[tuple[keras.metrics.Metric, Any]]"


def attribute_of_metric(
    original: Callable[[Any, str], Any], metric: Any, name: str
) -> Any:
    """Replace the look-up of ``result`` and ``update_state`` of a metric."""
    value = original(metric, name)
    if name == "update_state":
        return whole_metrics.method(metric, value)
    tower = tower_lib.current()
    if name != "result" or tower is None or compat.in_stateless_scope():
        return value

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = value(*args, **kwargs)
        tower.results.append((metric, result))
        return result

    return noted


class Logs:
    """Computes the logs of a Keras method."""

    def __init__(
        self,
        model: keras.Model,
        training: bool,
        transport: Transport,
        sources: dict[int, tuple[keras.metrics.Metric, int]] | None = None,
    ):
        self.training = training
        self.model = model
        self._transport = transport
        self._sources = {} if sources is None else sources

    def note(self, output: Any, results: Results) -> None:
        """Find out which logs are results of metrics."""
        known = {
            id(leaf): (metric, place)
            for metric, result in results
            for place, leaf in enumerate(tf.nest.flatten(result))
        }
        self._sources.clear()
        for index, leaf in enumerate(tf.nest.flatten(output)):
            if id(leaf) in known:
                self._sources[index] = known[id(leaf)]

    def of_batch(self, outputs: Sequence[Any], shares: Sequence[Any]) -> Any:
        """Compute the logs of a global batch."""
        # A metric's result, whatever its name in the logs, comes from the state
        # summed over the towers; any other value is taken for a mean over
        # examples.
        results = self.metric_results()
        towers = [tf.nest.flatten(output) for output in outputs]
        merged = [
            results[index] if index in results else self._mean(leaves, shares)
            for index, leaves in enumerate(zip(*towers, strict=True))
        ]
        return tf.nest.pack_sequence_as(outputs[0], merged)

    def _mean(self, leaves: Sequence[Any], shares: Sequence[Any]) -> tf.Tensor:
        values = [tf.convert_to_tensor(leaf) for leaf in leaves]
        kind = values[0].dtype
        if not (kind.is_floating or kind.is_complex):
            return values[0]
        here = tf.add_n(
            [
                value * tf.cast(share, kind)
                for value, share in zip(values, shares, strict=True)
            ]
        )
        return sum_over_ranks(self._transport, [here])[0]

    def metric_results(self) -> dict[int, Any]:
        """Compute the logs that are results of metrics, over all towers."""
        metrics = {id(metric): metric for metric, _ in self._sources.values()}
        results = self.read_over_all_towers(
            metrics.values(),
            lambda: {
                key: tf.nest.flatten(metric.result())
                for key, metric in metrics.items()
            },
        )
        return {
            index: results[id(metric)][place]
            for index, (metric, place) in self._sources.items()
        }

    def read_over_all_towers(
        self,
        metrics: Iterable[keras.metrics.Metric],
        read: Callable[[], Any],
    ) -> Any:
        """Return what is read while metrics have the state of all towers."""
        variables = {
            id(variable): variable
            for variable in [
                *state_lib.collect(self.model).metrics,
                *(v for metric in metrics for v in metric.variables),
            ]
            if isinstance(variable._value, compat.DistributedVariable)
        }
        with compat.single_device_mode(), tf.device("/device:CPU:0"):
            held = [v._value for v in variables.values()]
            seen = {id(value): _merged(value) for value in held}
            parts = [id(value) for value in held if not _is_whole(value)]
            sums = sum_over_ranks(self._transport, [seen[i] for i in parts])
            seen |= zip(parts, sums, strict=True)
            with variables_lib.viewed(
                variables.values(), lambda value: seen[id(value)]
            ):
                # A metric may return a variable, which has that state here.
                return tf.nest.map_structure(_read, read())


def _read(value: Any) -> Any:
    is_variable = isinstance(value, keras.Variable)
    return tf.convert_to_tensor(value) if is_variable else value


def _is_whole(value: Any) -> bool:
    return getattr(value, "merge", None) == variables_lib.WHOLE


def _merged(value: Any) -> tf.Tensor:
    if isinstance(value, variables_lib.TowerVariable):
        return value.merged_value()
    return value.values[0].read_value()
