"""The rows of all towers on every tower, with gradients: see ``gather``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit import told
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.tower import is_differentiable
from keras_towers.splitting import marks
from keras_towers.transport import Transport, next_key


@dataclasses.dataclass(eq=False)
class _Piece:
    """A tower's N tensors to be gathered, with its rows unless it is idle."""

    tensors: Sequence[tf.Tensor]
    live: Any

    def rows(self, index: int) -> Any:
        """Number of rows of a tensor: an int if known during tracing."""
        tensor = self.tensors[index]
        rows = tensor.shape[0]
        if rows is None or self.live is not None:
            rows = tf.shape(tensor, out_type=tf.int64)[0]
        return rows if self.live is None else tf.where(self.live, rows, 0)


@dataclasses.dataclass(eq=False)
class _Gathered:
    """A tower's N gathered tensors."""

    tensors: list[tf.Tensor]
    spans: list[tuple[Any, Any]]


def gather(
    context: Any, live: Any, transport: Transport, tensors: list[tf.Tensor]
) -> list[Any]:
    """Gather N tensors of [rows, ...]; gradients are summed over the towers."""
    told.warn_not_reduced(context.strategy)
    differentiable = [
        index
        for index, tensor in enumerate(tensors)
        if is_differentiable(tensor)
    ]

    count = len(tensors)

    def run(given: list[tf.Tensor]) -> list[Any]:
        """Return N gathered tensors, their N first rows, N numbers of rows."""
        zero, *mine = given
        context: Any = tf.distribute.get_replica_context()
        tower = tower_lib.current()

        def merge(strategy: Strategy, pieces: Any) -> Any:
            devices = strategy.extended.worker_devices
            pieces = strategy.experimental_local_results(pieces)
            return _concatenate(transport, zero, devices, pieces)

        piece = _Piece(mine, live if tower is None else tower.live)
        result = context.merge_call(merge, args=(piece,))
        firsts, counts = zip(*result.spans, strict=True)
        return [*result.tensors, *firsts, *counts]

    @tf.custom_gradient
    def exchange(zero, *tensors):
        stand = [
            tower_lib.Exchanged(
                "gather", t, tf.TensorShape([None, *t.shape[1:]])
            )
            for t in tensors
        ]
        span = tower_lib.Exchanged("span", zero, tf.TensorShape([]))
        stand += [span] * (2 * count)
        results = tower_lib.exchanged(stand, [zero, *tensors], run)
        wholes, spans = results[:count], results[count:]

        def gradient(*upstream):
            sums = context.all_reduce(
                tf.distribute.ReduceOp.SUM,
                [tf.convert_to_tensor(upstream[i]) for i in differentiable],
            )
            mine: list[Any] = [None] * count
            for index, total in zip(differentiable, sums, strict=True):
                first, rows = spans[index], spans[count + index]
                places = tf.cast(first, tf.int64) + tf.range(
                    tf.cast(rows, tf.int64), dtype=tf.int64
                )
                own = tf.gather(total, marks.marked(places, marks.OWN_ROWS))
                if live is not None:
                    own = _filled_up(own, tensors[index])
                mine[index] = tf.ensure_shape(own, tensors[index].shape)
            return None, *mine

        # TensorFlow need not search what other towers computed for variables.
        return [tf.stop_gradient(whole) for whole in wholes], gradient

    return list(exchange(_zero(transport), *tensors))


def _filled_up(own: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Add zeros for the rows of a tower without examples."""
    missing = tf.shape(like)[0] - tf.shape(own)[0]
    return tf.pad(own, [[0, missing]] + [[0, 0]] * (like.shape.rank - 1))


def _concatenate(
    transport: Transport,
    zero: tf.Tensor,
    devices: Sequence[str],
    pieces: Sequence[_Piece],
) -> Any:
    """Give each of the K towers the rows of all towers."""
    with tf.device(devices[0]):
        rows = [
            [piece.rows(index) for piece in pieces]
            for index in range(len(pieces[0].tensors))
        ]
        wholes = [
            _all_rows(pieces, index, counts)
            for index, counts in enumerate(rows)
        ]
        before: Any = [0] * len(rows)
        if transport.size > 1:
            before = _rows_before(transport, wholes, zero)
            wholes = [_of_all_ranks(transport, whole, zero) for whole in wholes]
    results = []
    for tower, device in enumerate(devices):
        spans = [
            (first + sum(counts[:tower]), counts[tower])
            for first, counts in zip(before, rows, strict=True)
        ]
        with tf.device(device):
            own = [tf.identity(whole) for whole in wholes]
        results.append(_Gathered(own, spans))
    return compat.PerReplica(results)


def _all_rows(
    pieces: Sequence[_Piece], index: int, counts: Sequence[Any]
) -> tf.Tensor:
    """Concatenate one tensor of the towers of this process."""
    tensors = [
        piece.tensors[index]
        if piece.live is None
        else piece.tensors[index][:count]
        for piece, count in zip(pieces, counts, strict=True)
    ]
    return tf.concat(tensors, 0)


def _rows_before(
    transport: Transport, wholes: Sequence[tf.Tensor], zero: tf.Tensor
) -> list[tf.Tensor]:
    """Return the numbers of rows that the ranks before this one have."""
    counts = tf.stack([tf.shape(w, out_type=tf.int64)[0] for w in wholes])
    every = transport.all_gather((counts + zero)[tf.newaxis], next_key("rows"))
    before = tf.reduce_sum(every[: transport.rank], 0)
    return tf.unstack(before, num=len(wholes))


def _of_all_ranks(
    transport: Transport, whole: tf.Tensor, zero: tf.Tensor
) -> tf.Tensor:
    everyone = transport.all_gather(whole[zero:], next_key("gather"))
    return tf.ensure_shape(everyone, [None, *whole.shape[1:]])


def _zero(transport: Transport) -> tf.Tensor:
    """Zero; with several ranks one that TensorFlow does not know to be."""
    # Its constant folding would run the gather of a constant, on a rank that
    # happens to trace.
    if transport.size == 1:
        return tf.zeros((), tf.int64)
    return _zero_variable().read_value()


def is_zero(handle: Any) -> bool:
    """Whether a handle is that of the variable by which ranks gather."""
    made = _zero_variable.cache_info().currsize
    return bool(made) and handle is _zero_variable().handle


@functools.cache
def _zero_variable() -> tf.Variable:
    with tf.init_scope(), compat.single_device_mode(), tf.device("CPU:0"):
        return tf.Variable(
            0,  # pyright: ignore[reportArgumentType]
            dtype=tf.int64,
            trainable=False,
            name="zero",
        )
