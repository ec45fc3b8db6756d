"""Merging per-tower logs into those that one device would return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport


class Logs:
    """Computes the logs of a Keras method.

    Metric results are computed from the metric state summed over the towers;
    anything else that a custom step returns is taken as a mean over examples.

    Args:
        model: the model.
        training: whether the method trains.
        written: ids of the variables that steps of the method have assigned;
            updated by the steps.
        transport: connects the processes.

    Attributes:
        model: the model.
        training: whether the method trains.
        written: ids of the variables that its steps have assigned.
    """

    def __init__(
        self,
        model: keras.Model,
        training: bool,
        written: set[int],
        transport: Transport,
    ):
        self.training = training
        self.written = written
        self.model = model
        self._transport = transport

    def of_batch(self, outputs: Sequence[Any], shares: Sequence[Any]) -> Any:
        """Compute the logs of a global batch.

        Args:
            outputs: the results of the step on the K towers of this process.
            shares: their K fractions of the global batch.

        Returns:
            A structure like that of one output.
        """
        first = outputs[0]
        results = {}
        if isinstance(first, Mapping):
            results = self.metric_results(first)

        def mean(*tensors: Any) -> tf.Tensor:
            values = [tf.convert_to_tensor(tensor) for tensor in tensors]
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

        def merge(name: str) -> Any:
            if name in results:
                return results[name]
            return tf.nest.map_structure(mean, *[out[name] for out in outputs])

        if isinstance(first, Mapping):
            return {name: merge(name) for name in first}
        return tf.nest.map_structure(mean, *outputs)

    def of_epoch(self, logs: Any) -> Any:
        """Compute the logs of an epoch over all ranks.

        The metrics of the model hold only the state of this process.
        """
        if self._transport.size == 1 or not isinstance(logs, Mapping):
            return logs
        return {**logs, **self.metric_results(logs)}

    def metric_results(self, names: Iterable[str]) -> dict[str, Any]:
        """Compute the metric results among ``names``, over all towers.

        Args:
            names: names of logs.

        Returns:
            The results by name, without logs that are not metric results.
        """
        model = self.model
        metrics = state_lib.collect(model).metrics
        with compat.single_device_mode(), tf.device("/device:CPU:0"):
            unused = {
                name
                for metric in model.metrics
                for name in self._unused(metric)
            }
            seen = {
                id(v._value): _merged(v._value)
                for v in metrics
                if isinstance(v._value, compat.DistributedVariable)
            }
            sums = sum_over_ranks(self._transport, list(seen.values()))
            seen = dict(zip(seen, sums, strict=True))
            with variables_lib.viewed(metrics, lambda v: seen[id(v)]):
                results = model.get_metrics_result()
        names = set(names) - unused
        return {name: value for name, value in results.items() if name in names}

    def _unused(self, metric: keras.metrics.Metric) -> list[str]:
        """Return the log names of a metric that no step has updated.

        A custom step may return other values under these names.
        """
        for variable in metric.variables:
            if {id(variable), id(variable._value)} & self.written:
                return []
        result = metric.result()
        return list(result) if isinstance(result, Mapping) else [metric.name]


def _merged(value: compat.DistributedVariable) -> tf.Tensor:
    if isinstance(value, variables_lib.TowerVariable):
        return value.merged_value()
    return value.values[0].read_value()
