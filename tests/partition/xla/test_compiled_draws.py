"""XLA compiles draws in functions that run without it."""

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.called_functions import CalledFunctions
from keras_towers.partition.xla.compiled_draws import CompiledDraws
from keras_towers.partition.xla.kernels import Kernels

_KERNELS = Kernels("/device:CPU:0", CalledFunctions())


def draw(k):
    """A draw in a branch, of constants and of a number."""
    other = tf.random.stateless_uniform([2], tf.stack([k, 4]))
    return tf.cond(
        k < 1,
        lambda: tf.random.stateless_truncated_normal([2], (1, 2)) + other,
        lambda: tf.cast(
            tf.random.stateless_categorical(tf.ones([1, 9]), 2, (k, 6))[0],
            tf.float32,
        ),
    )


def summed():
    _, total = tf.while_loop(
        lambda k, _: k < 3, lambda k, t: (k + 1, t + draw(k)), (0, tf.zeros(2))
    )
    return total


def test_draws_in_loops_and_branches_are_those_of_xla():
    with compat.trace_context(xla=True):
        traced = compat.func_graph_from_py_func("summed", summed, [], {})
    function = compat.function_module.from_func_graph("loop", traced, {})
    name = tf.compat.as_str(function.name)

    @tf.function
    def run():
        graph = compat.get_default_graph()
        compat.add_functions(graph, [function])
        draws = CompiledDraws(graph, _KERNELS)
        definition = tf.compat.v1.GraphDef()
        node = definition.node.add(name="call", op="PartitionedCall")
        node.attr["f"].func.name = draws.rename(name)
        node.attr["Tin"].list.SetInParent()
        node.attr["Tout"].list.type.append(tf.float32.as_datatype_enum)
        (total,) = tf.graph_util.import_graph_def(
            definition, return_elements=["call:0"]
        )
        return total

    found = run().numpy().tolist()
    assert found == tf.function(summed, jit_compile=True)().numpy().tolist()
    assert found != tf.function(summed)().numpy().tolist()


def test_a_function_without_draws_stays():
    function = tf.function(lambda: tf.ones([2])).get_concrete_function()
    name = tf.compat.as_str(function.inference_fn.name)
    draws = CompiledDraws(function.graph, _KERNELS)
    assert draws.rename(name) == name
