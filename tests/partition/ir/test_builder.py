"""Attributes of operations that are added to a program."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.builder import Builder

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("field", "given", "stored"),
    [
        ("i", [1, 2], [1, 2]),
        ("f", [0.5], [0.5]),
        ("b", [True, False], [True, False]),
        ("s", ["a"], [b"a"]),
        ("type", [tf.float32], [tf.float32.as_datatype_enum]),
        ("shape", [tf.TensorShape([2])], [tf.TensorShape([2]).as_proto()]),
    ],
)
def test_attributes_that_are_lists_keep_all_entries(field, given, stored):
    builder = Builder()
    builder.add("AnOperation", [], {"name": given}, [])
    (operation,) = builder.operations
    entries = operation.attributes["name"].list
    assert list(getattr(entries, field)) == stored
