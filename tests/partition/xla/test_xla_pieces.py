"""What XLA compiles of a level, as functions and single operations in turn."""

import types as python_types

import tensorflow as tf

from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.xla.xla_pieces import Stages, needs_call

NUMBER = tf.TensorShape([])


def divided(builder, results=()):
    """The types of operations in each stage, and what is said of them."""
    operations = [o for o in builder.operations if not o.is_repeated]
    program = python_types.SimpleNamespace(
        operations=builder.operations,
        exchanges=[],
        updates=[],
        results=results,
        values={},
        graphs=[],
    )
    stages = Stages(program, "/device:CPU:0")
    found = [
        ([o.type for o in s.compiled], [o.type for o in s.single])
        for s in stages.of(operations)
    ]
    return found, stages.not_compiled


def types(builder):
    found, not_compiled = divided(builder)
    assert not not_compiled
    return found


def read(builder, handle):
    (value,) = builder.add(
        "ReadVariableOp", [handle], {}, [(tf.float32, NUMBER)]
    )
    return value


def assign(builder, handle, value):
    builder.add("AssignVariableOp", [handle, value], {}, [], has_effect=True)


def variable():
    return Tensor(tf.resource, NUMBER)


def test_variables_are_read_before_one_function_and_written_after_it():
    builder, handles = Builder(), [variable(), variable()]
    for handle in handles:
        value = read(builder, handle)
        assign(builder, handle, builder.op("Square", [value], ()))
    assert types(builder) == [
        ([], ["ReadVariableOp"] * 2),
        (["Square"] * 2, ["AssignVariableOp"] * 2),
    ]


def test_what_is_read_after_a_write_needs_another_function():
    builder, handle = Builder(), variable()
    assign(builder, handle, builder.op("Square", [read(builder, handle)], ()))
    builder.op("Exp", [read(builder, handle)], ())
    assert types(builder) == [
        ([], ["ReadVariableOp"]),
        (["Square"], ["AssignVariableOp", "ReadVariableOp"]),
        (["Exp"], []),
    ]


def test_strings_and_effects_stay_outside_in_their_order():
    builder = Builder()
    number = builder.op("Square", [builder.constant(2, tf.float32)], ())
    text = builder.op("AsString", [number], ())
    builder.add("PrintV2", [text], {}, [], has_effect=True)
    builder.op("Exp", [number], ())
    assert types(builder) == [(["Square", "Exp"], ["AsString", "PrintV2"])]


def test_repeated_operations_belong_to_those_that_use_them():
    builder, handle = Builder(), variable()
    size = builder.cast(read(builder, handle), tf.int64)
    builder.op("Fill", [builder.size_vector([size], tf.int64), 1.0], (None,))
    assert types(builder) == [([], ["ReadVariableOp"]), (["Fill"], [])]


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


def test_only_what_xla_lacks_runs_without_it():
    builder = Builder()
    given = Tensor(tf.complex64, tf.TensorShape([4, 4]))
    before = builder.op("Square", [given], (4, 4))
    builder.op("Exp", [builder.op("MatrixLogarithm", [before], (4, 4))], (4, 4))
    assert types(builder) == [
        (["Square"], ["MatrixLogarithm"]),
        (["Exp"], []),
    ]


def _list(builder, variable):
    """A list that is made, and used after a variable is read."""
    made = builder.op(
        "TensorListReserve", [[3], 2], (), element_dtype=tf.float32
    )
    return builder.op(
        "TensorListSetItem",
        [made, 0, read(builder, variable)],
        (),
        element_dtype=tf.float32,
    )


def test_a_list_is_made_where_it_is_used_and_may_leave_a_function():
    builder = Builder()
    result = _list(builder, variable())
    found, not_compiled = divided(builder, [result])
    assert not not_compiled
    assert found == types(builder)
    assert found == [
        ([], ["ReadVariableOp"]),
        (["TensorListSetItem"], []),
    ]


def test_a_list_of_lists_that_leaves_a_function_is_not_compiled():
    builder = Builder()
    outer = builder.op(
        "EmptyTensorList", [[0], 2], (), element_dtype=tf.variant
    )
    inner = _list(builder, variable())
    result = builder.op(
        "TensorListPushBack", [outer, inner], (), element_dtype=tf.variant
    )
    found, (why,) = divided(builder, [result])
    assert "holds lists" in why
    assert all("TensorListPushBack" not in compiled for compiled, _ in found)


def test_draws_from_a_generator_of_tensorflow_are_told():
    builder = Builder()
    builder.add(
        "RandomStandardNormal",
        [builder.constant([3], tf.int32)],
        {"dtype": tf.float32, "T": tf.int32},
        [(tf.float32, tf.TensorShape([3]))],
        has_effect=True,
    )
    found, (why,) = divided(builder)
    assert found == [([], ["RandomStandardNormal"])]
    assert "generator" in why
