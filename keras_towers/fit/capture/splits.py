"""Whether the step of a tower, as it is traced, splits over towers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.capture import checks
from keras_towers.fit.capture.trace import TracedStep
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.splitting import (
    MEAN,
    SUM,
    Analysis,
    Result,
    Variable,
    analyse,
)
from keras_towers.splitting.growing import of_batch
from keras_towers.splitting.places import of_ragged
from keras_towers.splitting.sparse import of_sparse
from keras_towers.splitting.values import Value, handle, other, same

_MERGES: Any = {variables_lib.SUM: "sum", variables_lib.MEAN: "mean"}


def analysed(trace: TracedStep, predicts: bool = False) -> Analysis:
    """Analyse a traced step; ``predicts``: it returns a row per example."""
    inputs: list[Value] = []
    for index, leaf in enumerate(tf.nest.flatten(trace.data)):
        if isinstance(leaf, tf.Tensor):
            inputs.append(of_batch(leaf, index))
            continue
        if isinstance(leaf, tf.SparseTensor) and leaf.shape.rank is not None:
            parts = trace.graph.inputs[len(inputs) : len(inputs) + 3]
            inputs += of_sparse([part.op for part in parts], list(leaf.shape))
            continue
        parts = checks.leaves_of(leaf)
        if isinstance(leaf, tf.RaggedTensor) and _is_plain(leaf):
            begin = len(inputs)
            inputs += of_ragged(index, trace.graph.inputs[begin].shape[1:])
            continue
        for part in parts:
            if not isinstance(part, tf.Tensor):
                continue
            # Each example may have another number of entries.
            at = trace.graph.inputs[len(inputs)].op
            text = f"gets a {type(leaf).__name__}, which is not followed"
            inputs.append(other(text, at, is_open=True))
    inputs += [same(1, shape=())] * isinstance(trace.tower.share, tf.Tensor)
    inputs += [same(shape=())] * isinstance(trace.tower.live, tf.Tensor)
    if trace.tower.rows is not None:
        inputs.append(other("numbers the examples of the batch"))
        if len(trace.graph.inputs) - len(trace.graph.captures) > len(inputs):
            inputs.append(same(shape=()))
    variables: dict[Any, Variable] = {}
    for outside, inside in trace.graph.captures:
        if outside.dtype == tf.resource:
            variables[inside.name] = _variable(outside, inside)
            inputs.append(handle(inside.name))
        else:
            known = inside.shape.is_fully_defined()
            inputs.append(same(shape=tuple(inside.shape) if known else None))
    results = results_of(trace, predicts)
    return analyse(trace.graph, inputs, variables, results)


def results_of(trace: TracedStep, predicts: bool = False) -> Iterator[Result]:
    """Return the results of a traced step; see ``analysed``."""
    return _outputs(trace) if predicts else _results(trace)


def _is_plain(leaf: tf.RaggedTensor) -> bool:
    """Whether a ragged tensor has entries and one tensor of row splits only."""
    values = leaf.values
    flat = isinstance(values, tf.Tensor) and values.shape.rank is not None
    return flat and values.shape[0] is None


def owners_of(trace: TracedStep) -> dict[str, Any]:
    """Return a trace's variables on towers, or None, by the analysis's keys."""
    return {
        inside.name: checks.owner_of(outside)
        for outside, inside in trace.graph.captures
        if outside.dtype == tf.resource
    }


def may_overflow(trace: TracedStep) -> bool:
    """Whether a step is skipped where its gradients overflow in float16."""
    scaled = keras.optimizers.LossScaleOptimizer
    updates = trace.captured.updates
    if not any(isinstance(call.optimizer, scaled) for call in updates):
        return False
    return any(
        tensor.dtype == tf.float16
        for operation in trace.graph.get_operations()
        for tensor in operation.outputs
    )


def _variable(outside: Any, inside: Any) -> Variable:
    owner = checks.owner_of(outside)
    if isinstance(owner, variables_lib.TowerVariable):
        return Variable(owner.name.partition(":")[0], _MERGES.get(owner.merge))
    return Variable(inside.op.name)


def _outputs(trace: TracedStep) -> Iterator[Result]:
    output = trace.captured.output
    for path, leaf in keras.tree.flatten_with_path(output):
        if isinstance(leaf, tf.Tensor):
            yield Result("output", "/".join(map(str, path)) or "output", leaf)


def _results(trace: TracedStep) -> Iterator[Result]:
    captured = trace.captured
    weighted = captured.loss_is_weighted or not trace.tower.average
    degree = SUM if weighted else MEAN
    for call in captured.updates:
        for name, grad in zip(call.names, call.grads, strict=True):
            if isinstance(grad, tf.IndexedSlices):
                rows, places = grad.values, grad.indices
                yield Result("gradient", name, rows, degree, places)
            elif grad is not None:
                yield Result("gradient", name, grad, degree)
    known = {
        id(leaf)
        for _, result in captured.results
        for leaf in tf.nest.flatten(result)
    }
    for path, leaf in keras.tree.flatten_with_path(captured.output):
        if isinstance(leaf, tf.Tensor) and id(leaf) not in known:
            yield Result("log", "/".join(map(str, path)) or "loss", leaf)
