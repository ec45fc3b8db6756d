"""What tables hold that never change."""

import tensorflow as tf

from keras_towers.fit.step.graph.fixed_tables import content_of_fixed


def _static(keys, values):
    entries = tf.lookup.KeyValueTensorInitializer(keys, values)
    return tf.lookup.StaticHashTable(entries, -1)


def _content(table):
    return content_of_fixed(table.resource_handle, tf.string, tf.int32)


def test_tables_of_equal_entries_have_one_content():
    words = [f"word {k}" for k in range(9)]
    table = _static(words, [*range(9)])
    backwards = _static(words[::-1], [*range(9)][::-1])
    assert _content(table) == _content(backwards)
    others = (words[1:], [*range(1, 9)]), (words, [*range(1, 10)])
    for other in (*others, (words[::-1], [*range(9)])):
        assert _content(_static(*other)) != _content(table)
    assert table.lookup(tf.constant("word 3")).numpy() == 3


def test_a_table_that_may_change_has_none():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int32, -1)
    table.insert(["a"], [1])
    assert _content(table) is None
    assert table.lookup(tf.constant("a")).numpy() == 1
