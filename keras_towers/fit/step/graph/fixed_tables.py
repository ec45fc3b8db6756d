"""Tables that never change after they are made, such as vocabularies.

Every rank looks up keys in its own table, so ranks compare the contents.
"""

from __future__ import annotations

import tensorflow as tf

from keras_towers.foundation import compat


def content_of_fixed(
    handle: tf.Tensor, keys: tf.DType, values: tf.DType
) -> str | None:
    """Describe the entries of a table; equal entries give equal text.

    Args:
        handle: the handle of the table.
        keys: the dtype of its keys.
        values: the dtype of what they are looked up for. TensorFlow ends the
            process if a table has other dtypes.

    Returns:
        None: its entries may change.
    """
    with tf.init_scope(), tf.device(compat.HOST):
        try:
            entries = tf.raw_ops.LookupTableExportV2(
                table_handle=handle, Tkeys=keys, Tvalues=values
            )
            # Only a table that is filled once takes the same entries again.
            tf.raw_ops.InitializeTableV2(
                table_handle=handle, keys=entries.keys, values=entries.values
            )
        except tf.errors.OpError:
            return None
        rows = tf.concat([*map(tf.fingerprint, entries)], 1)
        digests = tf.bitcast(tf.fingerprint(rows), tf.uint64)
        # Each process exports them in an order of its own.
        digest = int(tf.reduce_sum(digests))
    number = entries.keys.shape[0]
    return f"a table of {number} entries with the checksum {digest:016x}"
