"""What is known of values: their layouts, shapes and entries."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.ir.layouts import (
    PARTIAL,
    REPLICATED,
    InShards,
    ListOf,
    Sharded,
    Unit,
    is_row_per_element,
    local_shape,
    may_hold_rows,
    sizes_of,
    stacked_layout,
)
from keras_towers.partition.ir.sizes import EXAMPLES, UNKNOWN
from keras_towers.partition.ir.values import (
    Elements,
    Value,
    common_elements,
    common_facts,
    have_same_facts,
)

pytestmark = pytest.mark.core

N = EXAMPLES


def _unit(size, **options):
    return Unit(size, None, None, None, **options)


ROWS, SIX = _unit(N), _unit(6)


@pytest.mark.parametrize(
    ("unit", "size", "wanted"),
    [
        (ROWS, N, 1),
        (ROWS, 6 * N, 6),
        (ROWS, N * N, None),
        (ROWS, 6, None),
        (ROWS, UNKNOWN, None),
        (SIX, 6, 1),
        (SIX, 18, 3),
        (SIX, 9, None),
        (SIX, N, None),
    ],
)
def test_rows_per_unit_in(unit, size, wanted):
    assert Sharded(0, unit).rows_per_unit_in(size) == wanted


# ---- common facts ------------------------------------------------------------


def test_common_facts():
    a = Value(REPLICATED, shape=(N, 3, UNKNOWN), known=np.array([1, 2], object))
    b = Value(REPLICATED, shape=(N, 4, UNKNOWN), known=np.array([1, 3], object))
    both = common_facts(a, b, PARTIAL)
    assert both.layout == PARTIAL
    assert (both.shape[0], both.shape[1:]) == (N, (UNKNOWN, UNKNOWN))
    assert both.known.tolist() == [1, UNKNOWN]
    for other in (Value(REPLICATED), Value(REPLICATED, shape=(N, 3))):
        none = common_facts(a, other)
        assert none.shape is None and none.known is None
    assert common_facts(a, dataclasses.replace(b, known=a.known[:1])).known is (
        None
    )


_LIST = Elements(tf.float32, [3], 2, Value(REPLICATED, shape=(3,)))


@pytest.mark.parametrize(
    "changed",
    [
        {"declared": [4]},
        {"length": 5},
        {"is_full": False},
        {"are_row_numbers": False},
    ],
)
def test_common_elements(changed):
    other = dataclasses.replace(_LIST, **changed)
    unknown = {"declared": None, "length": UNKNOWN}
    ((name, value),) = changed.items()
    for pair in ((_LIST, other), (other, _LIST)):
        wanted = dataclasses.replace(_LIST, item=None, **changed)
        wanted = dataclasses.replace(wanted, **{name: unknown.get(name, value)})
        found = common_elements(*pair)
        assert found.item.shape == (3,)
        assert dataclasses.replace(found, item=None) == wanted


def test_common_elements_of_lists_that_differ_in_kind():
    assert common_elements(_LIST, None) is common_elements(None, _LIST) is None
    for changed in ({"dtype": tf.int32}, {"is_optional": True}):
        other = dataclasses.replace(_LIST, **changed)
        assert common_elements(_LIST, other) is None


def test_a_list_without_elements_has_the_facts_of_any():
    none = dataclasses.replace(_LIST, item=None)
    for pair in ((none, _LIST), (_LIST, none)):
        assert common_elements(*pair).item.shape == (3,)
    assert common_elements(none, none).item is None
    other = dataclasses.replace(_LIST, item=Value(REPLICATED, shape=(4,)))
    for pair in ((other, _LIST), (_LIST, other)):
        assert common_elements(*pair).item.shape == (UNKNOWN,)


def test_with_item():
    item = Value(REPLICATED, shape=(4,))
    after = _LIST.with_item(item)
    assert after.shape == (UNKNOWN,) and not after.are_row_numbers
    none = dataclasses.replace(_LIST, item=None)
    assert none.shape is None
    assert none.with_item(item, is_row_number=True).are_row_numbers
    assert none.with_item(item).shape == (4,)


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": PARTIAL},
        {"shape": (4, 2)},
        {"known": None},
        {"known": np.array([[1], [2]], object)},
        {"known": np.array([1, 3], object)},
        {"elements": None},
        {"elements": dataclasses.replace(_LIST, length=UNKNOWN)},
        {"elements": dataclasses.replace(_LIST, item=None)},
    ],
)
def test_have_same_facts(changed):
    a = Value(
        REPLICATED,
        shape=(3, 2),
        known=np.array([1, 2], object),
        elements=_LIST,
    )
    assert have_same_facts(a, dataclasses.replace(a, whole="another"))
    assert not have_same_facts(a, dataclasses.replace(a, **changed))


def test_unknown_entries_are_the_same_facts():
    a = Value(REPLICATED, shape=(UNKNOWN,), known=np.array([UNKNOWN], object))
    assert have_same_facts(a, dataclasses.replace(a))


# ---- elements and shapes -----------------------------------------------------


def test_layouts_of_elements():
    assert is_row_per_element(Sharded(-1))
    for other in (Sharded(0), PARTIAL, ListOf(PARTIAL)):
        assert not is_row_per_element(other)
    assert stacked_layout(Sharded(-1, ROWS)) == Sharded(0, ROWS)
    assert stacked_layout(Sharded(1, ROWS, 2)) == Sharded(2, ROWS, 2)
    assert stacked_layout(PARTIAL) == PARTIAL
    for size, wanted in ((-1, True), (2 * N, True), (3, False), (N, False)):
        assert may_hold_rows(size, Sharded(0, ROWS, rows=2)) == wanted
    assert not may_hold_rows(UNKNOWN, Sharded(0, ROWS))


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        (REPLICATED, [4, 6]),
        (PARTIAL, [4, 6]),
        (Sharded(1), [4, None]),
        (Sharded(0, _unit(N, local_size=2), rows=3), [6, 6]),
        (Sharded(1, _unit(N)), [4, None]),
        (InShards(0, 4), [None, 6]),
        (InShards(1, 6, rows=2), [4, 2]),
    ],
)
def test_local_shape(layout, wanted):
    assert local_shape(tf.TensorShape([4, 6]), layout) == wanted
    unknown = tf.TensorShape(None)
    assert local_shape(unknown, layout).rank is None
    assert sizes_of(tf.TensorShape([None, 3])) == (UNKNOWN, 3)
