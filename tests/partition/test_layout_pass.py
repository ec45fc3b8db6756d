"""In which order operations are laid out."""

import types

from keras_towers.partition.layout_pass import sort_topologically


def _operation(name, *sources):
    inputs = [types.SimpleNamespace(name=f"{o.name}:0", op=o) for o in sources]
    return types.SimpleNamespace(name=name, inputs=inputs)


def test_operations_come_after_those_that_they_need_each_once():
    """However they were created; some are needed twice."""
    first = _operation("first")
    left, right = _operation("left", first), _operation("right", first)
    both = _operation("both", left, right, first)
    last = _operation("last", left, both)
    given = [last, right, both, first, left]
    found = [o.name for o in sort_topologically(given, {})]
    assert sorted(found) == sorted(o.name for o in given)
    for operation in given:
        for tensor in operation.inputs:
            assert found.index(tensor.op.name) < found.index(operation.name)


def test_what_is_known_is_not_waited_for():
    outside = _operation("outside")
    inside = _operation("inside", outside)
    assert [*sort_topologically([inside], {"outside:0": 1})] == [inside]
