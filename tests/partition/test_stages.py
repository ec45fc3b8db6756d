"""What is computed once, as functions and single operations in turn."""

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import Builder
from keras_towers.partition.program import Tensor
from keras_towers.partition.stages import needs_call, stages_of

NUMBER = tf.TensorShape([])


def types(stages):
    return [
        ([o.type for o in s.compiled], [o.type for o in s.single])
        for s in stages
    ]


def read(builder, handle):
    (value,) = builder.add(
        "ReadVariableOp", [handle], {}, [(tf.float32, NUMBER)]
    )
    return value


def assign(builder, handle, value):
    builder.add("AssignVariableOp", [handle, value], {}, [], has_effect=True)


def variable():
    return Tensor(tf.resource, NUMBER, False)


def test_variables_are_read_before_one_function_and_written_after_it():
    builder, handles = Builder(), [variable(), variable()]
    for handle in handles:
        value = read(builder, handle)
        assign(builder, handle, builder.op("Square", [value], ()))
    assert types(stages_of(builder.operations)) == [
        ([], ["ReadVariableOp"] * 2),
        (["Square"] * 2, ["AssignVariableOp"] * 2),
    ]


def test_what_is_read_after_a_write_needs_another_function():
    builder, handle = Builder(), variable()
    assign(builder, handle, builder.op("Square", [read(builder, handle)], ()))
    builder.op("Exp", [read(builder, handle)], ())
    assert types(stages_of(builder.operations)) == [
        ([], ["ReadVariableOp"]),
        (["Square"], ["AssignVariableOp", "ReadVariableOp"]),
        (["Exp"], []),
    ]


def test_strings_and_effects_stay_outside_in_their_order():
    builder = Builder()
    number = builder.op("Square", [np.float32(2)], ())
    text = builder.op("AsString", [number], ())
    builder.add("PrintV2", [text], {}, [], has_effect=True)
    builder.op("Exp", [number], ())
    assert types(
        stages_of([o for o in builder.operations if not o.is_repeated])
    ) == [(["Square", "Exp"], ["AsString", "PrintV2"])]


def test_repeated_operations_belong_to_those_that_use_them():
    builder, handle = Builder(), variable()
    size = builder.cast(read(builder, handle), tf.int64)
    builder.op("Fill", [builder.size_vector([size], tf.int64), 1.0], (None,))
    once = [o for o in builder.operations if not o.is_repeated]
    assert types(stages_of(once)) == [([], ["ReadVariableOp"]), (["Fill"], [])]


def test_only_large_results_and_draws_need_a_call():
    def operations(make):
        builder = Builder()
        make(builder)
        return [o for o in builder.operations if not o.is_repeated]

    def draw(builder):
        builder.add("StatelessRandomUniformV2", [], {}, [(tf.float32, NUMBER)])

    def fill(number):
        return lambda builder: builder.op("Fill", [[number], 1.0], (number,))

    assert not needs_call(operations(fill(3)))
    assert needs_call(operations(fill(5000)))
    assert needs_call(operations(draw))
