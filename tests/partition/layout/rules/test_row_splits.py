"""How towers have where ragged rows begin and end, and what follows from it."""

import tensorflow as tf

from tests.partition.kit import ragged, sharded
from tests.partition.layout.rules.cases.case import axis_size
from tests.partition.layout_list import as_listed

VALUES, SPLITS = ragged(2)
X = sharded(-1, 4)
LENGTHS = sharded(-1, dtype="int32", low=0, high=3)


def _joined(values, splits):
    """Towers have the entries of their rows, by which splits are judged."""
    rows = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    return rows.to_tensor()


def _of(moved):
    """What follows from splits that were changed."""
    return lambda values, splits: _joined(values, moved(splits))


def _ranges(starts, limits):
    """Numbers of entries between two places of each row."""
    return lambda splits: (
        tf.ragged.range(starts(splits), limits(splits)).flat_values
    )


def _starts(splits):
    return splits[:-1]


def _ends(splits):
    return splits[1:]


def _clipped(splits):
    return tf.minimum(splits[:-1] + 1, splits[1:])


PLACES = {
    "splits": _of(lambda s: s),
    "splits of another dtype": _of(lambda s: tf.cast(s, tf.int32)),
    "splits from limits": _of(
        lambda s: tf.concat([[tf.constant(0, tf.int64)], s[1:]], 0)
    ),
    "splits from lengths": _of(
        lambda s: tf.concat(
            [[0], tf.cumsum(tf.cast(s[1:] - s[:-1], tf.int32))], 0
        )
    ),
    "lengths": lambda values, splits: splits[1:] - splits[:-1],
    "lengths the other way": lambda values, splits: splits[:-1] - splits[1:],
    "starts of all but one": lambda values, splits: splits[1:-1],
    "every second split": lambda values, splits: splits[::2],
    "all entries": lambda values, splits: tf.gather(
        values, _ranges(_starts, _ends)(splits)
    ),
    "the first entries": lambda values, splits: tf.gather(
        values, _ranges(_starts, _clipped)(splits)
    ),
    "the last entries": lambda values, splits: tf.gather(
        values, _ranges(lambda s: tf.maximum(s[1:] - 1, s[:-1]), _ends)(splits)
    ),
    "entries of the row before": lambda values, splits: _ranges(
        lambda s: tf.maximum(s[:-1] - 1, 0), _ends
    )(splits),
    "entries from before a row's start": lambda values, splits: _ranges(
        lambda s: s[:-1] - 1, _ends
    )(splits),
    "entries that may be of the next row": lambda values, splits: _ranges(
        _starts, lambda s: s[:-1] + 1
    )(splits),
    "even rows": lambda x: _joined(x, tf.range(axis_size(x) + 1)),
    "even rows of several": lambda x: _joined(
        tf.reshape(x, [-1]), 4 * tf.range(axis_size(x) + 1)
    ),
    "repeated rows": lambda x, lengths: tf.RaggedTensor.from_row_lengths(
        tf.repeat(x[:, 0], lengths), lengths, validate=False
    ).to_tensor(),
    "rows of given lengths": lambda x, lengths: tf.RaggedTensor.from_tensor(
        x, lengths=lengths
    ).to_tensor(),
    "rows without padding": lambda x: tf.RaggedTensor.from_tensor(
        tf.round(x), padding=0.0
    ).to_tensor(),
}


test_places_in_rows = as_listed("row_splits: places", PLACES)
