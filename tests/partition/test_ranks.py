"""Work that all ranks do, and work that only the first rank does."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.ir.axes import SHARDS
from keras_towers.partition.ir.layouts import FIXED, REPLICATED
from keras_towers.partition.layout.conversions import LayoutOptions
from tests.partition import kit

BATCH = tf.constant([1.0, 2.0, 3.0])
PARTS = [BATCH[:2], BATCH[2:2], BATCH[2:]]


def run_on_ranks(function, given, ranks=2, captured=REPLICATED):
    """Lay out a function for several processes.

    Args:
        function: takes some rows, and a variable, which each process has.
        given: the rows.
        ranks: the number of processes.
        captured: the layout of what the function captures.
    """
    variables = [tf.Variable(1.0) for _ in range(ranks)]
    # Unlike other tests' graphs, its branches and loops keep to an order.
    graph = compat.func_graph_from_py_func(
        "one_device",
        lambda x: [*map(tf.convert_to_tensor, function(x, variables[0]))],
        [given.spec],
        {},
    )
    layouts = [given.layout] + [captured] * len(graph.captures)
    program = partition_graph(
        graph, layouts, graph.outputs, options=LayoutOptions(axes=SHARDS)
    )

    @tf.function(autograph=False)
    def run(*parts):
        every = [
            [variable.handle for variable in variables]
            if outer is variables[0].handle
            else [outer]
            for outer, _ in graph.captures
        ]
        return kit.on_towers(program, [parts, *every], (2, 0, 1), ranks)

    return program, run, variables


def at_root(program):
    """The types of the operations that only the first process does."""
    return [o.type for o in program.operations if o.at_root]


def test_the_first_rank_draws_and_prints_for_all(capfd):
    def function(x, variable):
        noise = tf.random.normal(tf.shape(x))
        tf.print("here", tf.size(x))
        variable.assign(tf.reduce_sum(noise))
        return [tf.reduce_sum(x * noise)]

    program, run, variables = run_on_ranks(function, kit.sharded(-1))
    run(*PARTS)
    assert sorted(at_root(program)) == ["PrintV2", "RandomStandardNormal"]
    assert capfd.readouterr().err.count("here 3") == 1
    first, second = (variable.numpy() for variable in variables)
    assert first == second != 1


def test_variables_are_read_after_what_was_written_before():
    def function(x, variable):
        before = variable.read_value()
        variable.assign_add(tf.reduce_sum(x))
        between = x * variable
        variable.assign(tf.reduce_sum(between))
        return before, variable.read_value()

    _, run, variables = run_on_ranks(function, kit.sharded(-1))
    before, after = run(*PARTS)
    assert before.numpy() == 1
    assert [after.numpy(), *(v.numpy() for v in variables)] == [42, 42, 42]


def test_each_rank_has_its_own_variables_and_generators():
    generator = tf.random.Generator.from_seed(3)

    def function(x, variable):
        tf.debugging.assert_greater(x, 0.0)
        variable.assign_add(tf.reduce_sum(x))
        return [generator.uniform([]) + variable]

    program, run, variables = run_on_ranks(function, kit.sharded(-1))
    run(*PARTS)
    assert not at_root(program)
    assert not kit.exchange_counts(program)["root"]
    assert [variable.numpy() for variable in variables] == [7, 7]


def test_tables_are_written_on_all_ranks_and_read_on_the_first():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def function(x, _):
        keys = tf.cast(x, tf.int64)
        table.insert(keys, x * 2)
        return table.lookup(keys), table.size()

    program, run, _ = run_on_ranks(function, kit.sharded(-1))
    found, size = run(*PARTS)
    np.testing.assert_array_equal(found, BATCH * 2)
    assert size.numpy() == 3
    assert at_root(program) == ["LookupTableFindV2", "LookupTableSizeV2"]


@pytest.mark.parametrize(
    ("captured", "once"), [(REPLICATED, ["LookupTableFindV2"]), (FIXED, [])]
)
def test_what_follows_a_lookup_in_a_table_is_divided(captured, once):
    """So is the lookup, if the table never changes."""
    entries = tf.lookup.KeyValueTensorInitializer([2], [7.0], tf.int64)
    table = tf.lookup.StaticHashTable(entries, 5.0)

    def function(x, _):
        found = table.lookup(tf.cast(x, tf.int64))
        once_more = tf.tanh(found)[:, None] @ [[1.0, 2.0]]
        return [tf.concat([found[:, None], x[:, None]], 1), once_more]

    program, run, _ = run_on_ranks(function, kit.sharded(-1), captured=captured)
    both, more = run(*PARTS)
    np.testing.assert_array_equal(both, [[5, 1], [7, 2], [5, 3]])
    np.testing.assert_allclose(more[:, 1], 2 * np.tanh([5, 7, 5]), 1e-6)
    assert at_root(program) == list(kit.computed_once(program)) == once
    (product,) = [o for o in program.operations if o.type == "MatMul"]
    assert "towers" in product.axes


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_a_branch_or_loop_that_writes_a_variable(draws, loops):
    def once(variable):
        drawn = tf.random.uniform([]) if draws else 0.5
        return variable.assign_add(drawn, read_value=True)

    def function(x, variable):
        positive = tf.reduce_sum(x) > 0
        if loops:
            found = tf.while_loop(
                lambda k, _: k < 3,
                lambda k, _: (k + 1, once(variable)),
                [0, 0.0],
            )[1]
        else:
            found = tf.cond(
                positive, lambda: once(variable), lambda: variable * 1
            )
        return found - variable, variable.read_value()

    program, run, variables = run_on_ranks(function, kit.sharded(-1))
    off, value = run(*PARTS)
    first, second = (variable.numpy() for variable in variables)
    assert off.numpy() == 0
    assert value.numpy() == first == second > 1
    assert at_root(program) == (["While" if loops else "If"] if draws else [])


def test_a_branch_that_only_reads_has_no_effect():
    def function(x, variable):
        positive = tf.reduce_sum(x) > 0
        tf.cond(positive, lambda: variable * 2, lambda: variable * 3)
        return [tf.reduce_sum(x)]

    program, run, _ = run_on_ranks(function, kit.sharded(-1))
    assert run(*PARTS)[0].numpy() == 6
    assert "If" not in {operation.type for operation in program.operations}


def test_a_list_of_what_was_drawn():
    def function(x, _):
        drawn = tf.map_fn(lambda _: tf.random.uniform([]), tf.zeros([4]))
        return tf.reduce_sum(x), drawn

    program, run, _ = run_on_ranks(function, kit.sharded(-1))
    _, drawn = run(*PARTS)
    assert at_root(program) == ["While", "SerializeTensor"]
    assert len(set(drawn.numpy())) == 4


def test_one_process_has_no_root():
    def noisy(x):
        return x + tf.random.normal(tf.shape(x))

    assert not at_root(kit.laid_out(noisy, kit.sharded(-1)))
