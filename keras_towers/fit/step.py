"""One global batch on all towers, and the logs that one device would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import data as data_lib
from keras_towers.fit import state as state_lib
from keras_towers.fit import tower as tower_lib
from keras_towers.fit import variables as variables_lib
from keras_towers.fit.session import Session
from keras_towers.reduction import sum_over_ranks


def run(
    strategy: tf.distribute.Strategy,
    run_on_towers: Callable[..., Any],
    session: Session,
    step: Callable[[Any], Any],
    batch: Any,
) -> Any:
    """Run a step function of Keras on all towers.

    Args:
        strategy: the strategy.
        run_on_towers: ``Strategy.run`` of the strategy's base class.
        session: the call of Keras that this step belongs to.
        step: ``train_step``, ``test_step`` or a predict function.
        batch: a ``TowerBatch``, distributed values, or a whole batch that is
            still to be split.

    Returns:
        What the step returns for the global batch, as plain tensors: outputs of
        all examples in order for predictions, else logs of the global batch.
    """
    lockstep = strategy.lockstep
    batch = lockstep.begin(data_lib.as_tower_batch(strategy, batch))
    batch = _with_total(strategy, session, batch)
    shares = _shares(batch)
    devices = [
        tower_lib.short_name(d) for d in strategy.extended.worker_devices
    ]
    live = None
    if not isinstance(batch.counts, tuple):
        live = [count > 0 for count in _counts(batch)]

    def tower_step(index, data):
        tower = tower_lib.Tower(
            index=strategy.first_tower + index,
            total=strategy.num_replicas,
            share=shares[index],
            live=None if live is None else live[index],
            average=strategy.average,
            device=devices[index],
            training=session.trains,
            written=written,
        )
        with tower_lib.activate(tower):
            return step(data)

    written = strategy.adoption.written(session.model, session.trains)
    towers = range(strategy.num_towers)
    with lockstep.step():
        outputs = run_on_towers(
            tower_step,
            args=(
                compat.PerReplica(towers),
                compat.regroup(batch.pieces, always_wrap=True),
            ),
        )
    outputs = [compat.select_replica(index, outputs) for index in towers]
    if session.predicts:
        result = _in_order(outputs, batch)
        if strategy.batches == "split":
            result = lockstep.gather(result)
    else:
        result = _logs(strategy, session, outputs, shares)
    return lockstep.end(result)


def epoch_logs(strategy: Any, session: Session, logs: Any) -> Any:
    """The logs of all steps since the metrics were reset, over all ranks.

    What the metrics hold here is the part of this process.
    """
    if strategy.transport.size == 1 or not isinstance(logs, Mapping):
        return logs
    return {**logs, **metric_results(strategy, session, logs)}


def _with_total(
    strategy: Any, session: Session, batch: data_lib.TowerBatch
) -> data_lib.TowerBatch:
    """Count the examples of all towers, where the data does not tell."""
    if not (isinstance(batch.total, tuple) and batch.total == ()):
        return batch
    counts = _counts(batch)
    if all(isinstance(count, int) for count in counts):
        here = sum(counts)
    else:
        here = tf.add_n([tf.cast(count, tf.int64) for count in counts])
    if session.predicts or strategy.transport.size == 1:
        # Outputs are of the examples that are here, whoever else has some.
        return batch._replace(total=here)
    return strategy.lockstep.count(batch, here)


def _counts(batch: data_lib.TowerBatch) -> list[Any]:
    """Examples that every tower really has: ints, or scalar tensors."""
    if isinstance(batch.counts, tuple):
        return [data_lib.batch_size_of(piece) for piece in batch.pieces]
    return tf.unstack(batch.counts, num=len(batch.pieces))


def _shares(batch: data_lib.TowerBatch) -> list[Any]:
    """Every tower's part of the global batch; they add up to one."""
    counts = _counts(batch)
    if all(isinstance(count, int) for count in (*counts, batch.total)):
        return [count / batch.total for count in counts]
    total = tf.cast(batch.total, tf.float32)
    return [tf.cast(count, tf.float32) / total for count in counts]


def _in_order(outputs: Sequence[Any], batch: data_lib.TowerBatch) -> Any:
    """Put the towers' outputs behind one another, without borrowed examples."""
    if not isinstance(batch.counts, tuple):
        counts = _counts(batch)
        outputs = [
            tf.nest.map_structure(
                lambda t, n=count: data_lib.first_rows(t, n), output
            )
            for output, count in zip(outputs, counts, strict=True)
        ]
    return tf.nest.map_structure(
        lambda *tensors: data_lib.concatenate(tensors), *outputs
    )


def _logs(
    strategy: Any,
    session: Session,
    outputs: Sequence[Any],
    shares: Sequence[Any],
) -> Any:
    """Make the logs of the global batch from those of the towers.

    A log that is the result of a metric is computed from the metric's state
    summed over the towers; anything else that a custom step returns is taken
    for a mean over examples.
    """
    first = outputs[0]
    results = {}
    if isinstance(first, Mapping):
        results = metric_results(strategy, session, first)

    def mean(*tensors):
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        kind = tensors[0].dtype
        if not (kind.is_floating or kind.is_complex):
            return tensors[0]
        here = tf.add_n(
            [
                t * tf.cast(share, kind)
                for t, share in zip(tensors, shares, strict=True)
            ]
        )
        return sum_over_ranks(strategy.transport, [here])[0]

    def merge(name):
        if name in results:
            return results[name]
        return tf.nest.map_structure(mean, *[out[name] for out in outputs])

    if isinstance(first, Mapping):
        return {name: merge(name) for name in first}
    return tf.nest.map_structure(mean, *outputs)


def metric_results(
    strategy: Any, session: Session, logs: Mapping[str, Any]
) -> dict[str, Any]:
    """The logs that are results of metrics, over all towers and ranks."""
    model = session.model
    metrics = state_lib.collect(model).metrics
    with compat.single_device_mode(), tf.device("/device:CPU:0"):
        seen = {
            id(v._value): _merged(v._value)
            for v in metrics
            if isinstance(v._value, compat.DistributedVariable)
        }
        sums = sum_over_ranks(strategy.transport, list(seen.values()))
        seen = dict(zip(seen, sums, strict=True))
        with variables_lib.viewed(metrics, lambda v: seen[id(v)]):
            results = model.get_metrics_result()
            for metric in model.metrics:
                for name in _unused(strategy, session, metric):
                    results.pop(name, None)
    return {name: value for name, value in results.items() if name in logs}


def _unused(
    strategy: Any, session: Session, metric: keras.metrics.Metric
) -> list[str]:
    """The logs of a metric that no step has written to.

    A step may return something of its own under that name.
    """
    written = strategy.adoption.written(session.model, session.trains)
    if any(id(variable) in written for variable in metric.variables):
        return []
    result = metric.result()
    return list(result) if isinstance(result, Mapping) else [metric.name]


def _merged(value: compat.DistributedVariable) -> tf.Tensor:
    if isinstance(value, variables_lib.TowerVariable):
        return value.merged_value()
    return value.values[0].read_value()
