"""Operations of random programs within others: branches, loops and lists."""

import tensorflow as tf

from tests.partition import tensor_lists as lists
from tests.partition.layout.rules.cases.case import raw_op
from tests.partition.random_kinds import add_to, are_alike, bounded, size_of

NESTED, NESTED_OF_ROWS, OF_ROWS = [], [], []
ROUNDS = 3
_FLOATS = {"element_dtype": tf.float32}


def _joined(items, shape):
    """The elements of a list, joined along their first axis."""
    no_sizes = tf.constant([], tf.int64)
    return raw_op("TensorListConcatV2", **_FLOATS)(items, shape, no_sizes)[0]


@add_to(NESTED)
def _function(o):
    seed = o.seed()
    return tf.function(
        lambda *given: o.inside(seed, given, o.x)[0], autograph=False
    )(o.x, *o.pool[:3])


@add_to(NESTED)
def _branch(o):
    seed, way = o.seed(), o.draw.randrange(4)
    ways = (
        lambda: o.way,
        lambda: tf.reduce_sum(o.y) > 0,
        lambda: size_of(o.y) > 2,
        lambda: tf.rank(o.y) > 1,
    )

    def branch(seed):
        return lambda: o.inside(seed, [o.x, *o.pool[:4]], o.x)[0]

    if o.draw.random() < 0.3:
        at = tf.cast(ways[way](), tf.int32) + tf.cast(o.way, tf.int32)
        return tf.switch_case(at, [branch(seed + k) for k in range(3)])
    return tf.cond(ways[way](), branch(seed), branch(seed + 1))


@add_to(NESTED)
def _loop(o):
    seed = o.seed()
    often = o.one_of(
        lambda: o.draw.randrange(ROUNDS + 1), lambda: size_of(o.classes)
    )

    def body(i, *state):
        return i + 1, *o.inside(seed, [*state, *o.pool[:4]], *state)

    found = tf.while_loop(lambda i, *_: i < often, body, (0, o.x, o.rows))
    return o.draw.choice(found[1:])


@add_to(NESTED)
def _scan(o):
    seed, x = o.seed(), o.x
    items = tf.stack([x, x * 0.5, tf.sin(x)])
    found = tf.scan(
        lambda state, item: o.inside(seed, [state, item, *o.pool[:3]], x)[0],
        items,
    )
    return o.one_of(lambda: found[1], lambda: tf.reduce_sum(found, 0) * 0.3)


@add_to(NESTED)
def _array(o):
    seed, x = o.seed(), o.x
    options = {"clear_after_read": False}
    items = tf.TensorArray(tf.float32, ROUNDS, **options)
    items = items.unstack(tf.stack([x, x * 0.5, tf.sin(x)]))
    shape = o.draw.choice((None, x.shape))
    found = tf.TensorArray(tf.float32, ROUNDS, element_shape=shape, **options)

    def body(i, state, found):
        own = [state, items.read(i), *o.pool[:3]]
        after, item = o.inside(seed, own, state, x)
        return i + 1, after, found.write(i, item)

    _, state, found = tf.while_loop(
        lambda i, *_: i < ROUNDS, body, (0, x, found)
    )
    return o.one_of(
        lambda: state,
        lambda: found.read(1),
        lambda: found.stack()[2],
        lambda: tf.reduce_sum(found.stack(), 0) * 0.3,
    )


@add_to(NESTED)
def _elements(o):
    """A list of tensors, by TensorFlow's own operations."""
    x, others = o.x, [p for p in o.pool if are_alike(p, o.x)]
    shape = o.draw.choice([[-1] * (x.shape.rank - 1) + [2], tf.shape(x)])
    length = 3
    items = o.one_of(
        lambda: lists.list_of(tf.stack([x, o.rows, x * 0.5]), shape),
        lambda: lists.put(lists.reserved(shape, length), 1, o.rows),
        # An element among zeros.
        lambda: lists.put(
            lists.list_of(tf.zeros_like([x, x, x]), shape), 2, o.rows
        ),
    )
    for _ in range(o.draw.randrange(5)):
        item, at = o.draw.choice(others), o.draw.randrange(length)
        doing = o.draw.randrange(6)
        if doing == 0:
            items, length = lists.push(items, item), length + 1
        elif doing == 1 and length > 1:
            (items, _), length = lists.pop(items, shape), length - 1
        elif doing == 2:
            items = lists.put(items, at, item)
        elif doing == 3:
            items, length = lists.resized(items, length + 1), length + 1
        elif doing == 4:
            items = tf.add_n([items, items])
        else:
            two = tf.stack([item, x])
            order = o.draw.choice([[2, 0], [0, 1]])
            items, length = lists.scattered(two, order, shape, 3), 3
    at = o.draw.randrange(length)
    own = tf.shape(x)
    items = o.one_of(lambda: items, lambda: tf.raw_ops.ZerosLike(x=items))
    unlike = lists.push(
        lists.list_of(x[None], [-1] * x.shape.rank), tf.concat([x, x * 2], -1)
    )
    return o.one_of(
        lambda: lists.get(items, at, own) * 0.3,
        lambda: lists.get(items, tf.cast(o.way, tf.int32) % length, own) * 0.3,
        lambda: _joined(items, [-1, *x.shape[1:]])[: own[0]] * 0.3,
        lambda: tf.reduce_sum(lists.stack(items, own), 0) * 0.1,
        lambda: lists.picked(items, [at, 0], own)[0] * 0.3,
        lambda: lists.pop(lists.push(items, x), shape)[1],
        lambda: (
            x * tf.cast(tf.reduce_sum(lists.shape_of(items)), tf.float32) * 0.1
        ),
        lambda: lists.get(unlike, 1, [-1] * x.shape.rank)[..., -2:] * 0.3,
    )


@add_to(OF_ROWS)
def _rows_as_elements(o):
    """A list of which the elements are the rows of all examples."""
    x, n, items = o.x, size_of(o.x), lists.list_of(o.x, [2])
    one = o.draw.choice([p for p in o.pool if p.shape.rank == 1] or [x[0]])
    items, length = o.one_of(
        lambda: (items, n),
        lambda: (lists.push(items, one), n + 1),
        lambda: (lists.pop(lists.push(items, one), [2])[0], n),
        lambda: (lists.put(items, n - 1, one), n),
        lambda: (lists.put(items, 0, x[-1]), n),
        lambda: (lists.resized(items, n + 2), n + 2),
        lambda: (tf.add_n([items, items]), n),
    )
    return o.one_of(
        lambda: lists.stack(items, [2])[:n] * 0.5,
        lambda: lists.get(items, n - 1, [2]) * 0.5,
        lambda: lists.get(items, 0, [2]) * 0.5,
        lambda: lists.picked(items, tf.range(n)[::-1], [2]) * 0.5,
        lambda: x * tf.cast(lists.length_of(items) - length + 1, tf.float32),
    )


# ---- a round for each example ------------------------------------------------


@add_to(NESTED_OF_ROWS)
def _map(o):
    seed = o.seed()
    others = [p for p in o.pool if p.shape.rank == 1][:2]
    found = tf.map_fn(
        lambda pair: o.inside(
            seed,
            [pair[0], tf.cast(pair[1], tf.float32) * pair[0] * 0.1, *others],
            pair[0],
        )[0],
        (o.x, tf.range(size_of(o.x))),
        fn_output_signature=tf.TensorSpec((2,), tf.float32),
    )
    return found


@add_to(NESTED_OF_ROWS)
def _scan_of_rows(o):
    seed = o.seed()
    return tf.scan(lambda state, row: o.inside(seed, [state, row], row)[0], o.x)


@add_to(NESTED_OF_ROWS)
def _rounds(o):
    """A loop over examples, whose rounds may need those of others."""
    x, n, seed = o.x, size_of(o.x), o.seed()
    others = [p for p in o.pool if p.shape.rank == 1][:2]
    items = tf.TensorArray(tf.float32, n, clear_after_read=False).unstack(x)
    own = o.draw.choice([True, True, False])
    first, read_at, write_at, added = (
        o.draw.choice(ways[:1] if own else ways)
        for ways in (
            (lambda: 0, lambda: tf.minimum(n, 1)),
            (
                lambda i: i,
                lambda i: (i + 1) % n,
                lambda i: n - 1 - i,
                lambda i: tf.maximum(i - 1, 0),
            ),
            (lambda i: i, lambda i: n - 1 - i, lambda i: i // 2),
            (
                lambda s, item: s + item * 0.1,
                lambda s, item: s * 0.5 + item,
                lambda s, item: s * item,
                lambda s, item: s * 0.1 + s * 0.1 + item,
                lambda s, item: item,
            ),
        )
    )
    step = 1 if own else o.draw.choice([1, 2])
    least = None if own else o.draw.choice([None, 0.5])
    carries = not own and o.draw.random() < 0.3
    rereads = o.draw.random() < 0.3
    found = (
        items
        if rereads
        else tf.TensorArray(
            tf.float32, n, element_shape=(2,), clear_after_read=False
        )
    )

    def goes_on(i, total, _):
        more = i < n
        return more if least is None else more & (tf.reduce_sum(total) < least)

    def body(i, total, found):
        source = found if rereads else items
        given = [source.read(read_at(i)), items.read(i), *others]
        given += [total] if carries else []
        row, other = o.inside(seed, given, given[0], given[0])
        return i + step, added(total, other), found.write(write_at(i), row)

    start = o.one_of(
        lambda: tf.zeros([2]), lambda: (others or [tf.ones([2])])[0]
    )
    _, total, found = tf.while_loop(goes_on, body, (first(), start, found))
    return o.one_of(lambda: bounded(total), lambda: found.stack())


@add_to(OF_ROWS)
def _pushed(o):
    """A loop over examples that pops from a list, or pushes to one."""
    x, n = o.x, size_of(o.x)
    items = lists.list_of(x, [2])
    empty = lists.empty([2])
    pops = o.draw.random() < 0.5
    by = o.draw.choice(
        [
            lambda i, found: 1,
            lambda i, found: i + 1,
            lambda i, found: lists.length_of(found) + 1,
        ]
    )

    def body(i, items, found, total):
        if pops:
            items, row = lists.pop(items, [2])
        else:
            row = lists.get(items, i, [2])
        row = tf.tanh(row * tf.cast(by(i, found), tf.float32))
        return i + 1, items, lists.push(found, row), total + row * 0.1

    found = tf.while_loop(
        lambda i, *_: i < n, body, (0, items, empty, tf.zeros([2]))
    )
    return o.one_of(lambda: lists.stack(found[2], [2]), lambda: found[3])
