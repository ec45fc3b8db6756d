"""Programs that are drawn: operations on rows, within loops and branches.

A program has tensors of one row for each example, [n, 2], and of none, [2]. An
operation takes some of them and returns another one. In between it may have any
other rows: those that a mask leaves, segments, entries of ragged rows, pairs of
examples, elements of lists. Numbers stay small, and rounding with them.
"""

import random

import tensorflow as tf

from tests.partition import kit, tensor_lists as lists
from tests.partition.rules.cases.case import raw_op

# Branches and loops are within one another, but for one.
DEPTH = 2
ROUNDS = 3
SEGMENTS = 5
# Whether branches are taken, a class of each example, ragged rows, and four
# tensors.
GIVEN = (
    kit.replicated(1, dtype="bool"),
    kit.sharded(-1, dtype="int32", low=-1, high=SEGMENTS - 1),
    *kit.ragged(2),
    kit.sharded(-1, 2),
    kit.sharded(-1, 2),
    kit.replicated(2),
    kit.partial_sum(2),
)
_FLOATS = {"element_dtype": tf.float32}
_OF_ANY, _OF_ROWS, _NESTED, _NESTED_OF_ROWS = [], [], [], []


class Program:
    """A program that is drawn: a step for ``kit.check_on_towers``.

    Args:
        seed: of what is drawn.
        count: the number of its operations; a program of fewer begins like it.
        kind: of the operations that are in no other one; one of ``KINDS``.

    Attributes:
        drawn: the names of the operations, those within others, too.
    """

    def __init__(self, seed, count=5, kind=None):
        self._seed, self._count, self._kind = seed, count, kind
        self.way = self.classes = self.ragged = None
        self.drawn = []

    def __call__(self, way, classes, values, splits, *given):
        self.way, self.classes, self.drawn = way[0], classes, []
        self.ragged = tf.RaggedTensor.from_row_splits(
            values, splits, validate=False
        )
        with tf.GradientTape() as tape:
            tape.watch(given)
            draw = random.Random(self._seed)
            made = self._run(draw, given, DEPTH, self._count)[-3:]
            total = tf.add_n([tf.reduce_sum(tf.sin(y)) for y in made])
        return [*made, *tape.gradient(total, given)]

    def _run(self, draw, pool, depth, count):
        """Add some operations to what there is."""
        pool = list(pool)
        for _ in range(count):
            pool.append(self._operation(draw, pool, depth))
        return pool

    def _operation(self, draw, pool, depth):
        x, y = draw.choice(pool), draw.choice(pool)
        function = self._kind
        if function is None or depth < DEPTH:
            function = self._choose(draw, x, depth)
        elif x.shape.rank < 2:
            x = draw.choice([p for p in pool if p.shape.rank == 2])
        self.drawn.append(_name_of(function))
        found = function(_Operation(self, draw, x, y, pool, depth - 1))
        found.set_shape([None, 2] if found.shape.rank == 2 else [2])
        return found

    def _choose(self, draw, x, depth):
        """Choose what becomes of a tensor."""
        kinds = [_OF_ANY]
        if x.shape.rank == 2:
            kinds += 3 * [_OF_ROWS]
        if depth:
            kinds.append(_NESTED)
        if depth and x.shape.rank == 2:
            kinds.append(_NESTED_OF_ROWS)
        return draw.choice(draw.choice(kinds))

    def inside(self, seed, pool, depth, *wanted):
        """Results of a branch or a body, with the shapes of some tensors."""
        draw = random.Random(seed)
        made = self._run(draw, pool, depth, draw.randrange(1, 4))
        return [
            draw.choice([m for m in made if _alike(m, like)][-4:])
            for like in wanted
        ]


class _Operation:
    """What an operation is made of.

    Attributes:
        draw: draws what it does.
        x: its first input, of rows if the operation needs them.
        y: another one, of any shape.
        rows: another one with the shape of the first.
        pool: all tensors that there are.
        way: a truth value that all have.
        classes: whole numbers from -1, one for each example.
        ragged: ragged rows, one for each example.
    """

    def __init__(self, program, draw, x, y, pool, depth):
        self.draw, self.x, self.y, self.pool = draw, x, y, pool
        self.way, self.classes = program.way, program.classes
        self.ragged = program.ragged
        self.rows = draw.choice([p for p in pool if _alike(p, x)])
        self._program, self._depth = program, depth

    def one_of(self, *ways):
        """Do one of several things."""
        return self.draw.choice(ways)()

    def seed(self):
        return self.draw.random()

    def inside(self, seed, pool, *wanted):
        return self._program.inside(seed, pool, self._depth, *wanted)

    def numbers(self, depth=2):
        """Draw whole numbers, one for each row, some of which refer to rows."""
        n = _size(self.x)
        if not depth or self.draw.random() < 0.3:
            return self.one_of(
                lambda: tf.range(n),
                lambda: self.classes,
                lambda: tf.argmax(self.x, 1, tf.int32),
                lambda: tf.where(self.x[:, 0] < 9)[:, 0] + 0,
                lambda: tf.cumsum(tf.ones_like(self.classes)) - 1,
            )
        k = self.numbers(depth - 1)
        size = tf.cast(n, k.dtype)
        return self.one_of(
            lambda: k + 1,
            lambda: k * self.draw.choice([2, 3]),
            lambda: k // 2,
            lambda: size // (tf.abs(k) + 1),
            lambda: (k + 1) % size,
            lambda: size - 1 - k,
            lambda: tf.minimum(k, 3),
            lambda: tf.sort(k),
            lambda: k[::-1],
            lambda: tf.repeat(k, 2)[::2],
            lambda: tf.cast(tf.cast(k, tf.int8), tf.int32),
            lambda: tf.cast(tf.cast(k, tf.float32) / 2, tf.int32),
            lambda: tf.where(self.classes > 0, k, 0),
            lambda: tf.where(size > 2, k, k * 0),
            lambda: k + tf.cast(self.numbers(depth - 1), k.dtype),
            lambda: tf.gather(
                k, tf.cast(self.numbers(depth - 1), k.dtype) % size
            ),
        )

    def mask(self):
        """Draw a truth value of each row."""
        x = self.x
        return self.one_of(
            lambda: x[:, 0] > 0,
            lambda: self.classes > 0,
            lambda: self.numbers() % 2 == 0,
            lambda: self.numbers() > 1,
            lambda: tf.range(_size(x)) < 1,
            lambda: x[:, 1] >= tf.reduce_max(x[:, 1]),
            lambda: tf.reduce_sum(x, 1) > 9,
        )


def _name_of(function):
    return function.__name__.strip("_")


def _alike(a, b):
    return a.shape.as_list() == b.shape.as_list()


def _size(x):
    return tf.shape(x)[0]


def _pairs(x, y):
    """What pairs of an example and a later one make."""
    i, j = tf.meshgrid(tf.range(_size(x)), tf.range(_size(x)))
    later = tf.boolean_mask(tf.stack([i, j], -1), i < j)
    return tf.gather(x, later[:, 0]) - tf.gather(y, later[:, 1])


def _joined(items, shape):
    """The elements of a list, joined along their first axis."""
    no_sizes = tf.constant([], tf.int64)
    return raw_op("TensorListConcatV2", **_FLOATS)(items, shape, no_sizes)[0]


def _repeated(values, lengths):
    lengths = tf.cast(lengths, tf.int64)
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)


def _bounded(x):
    """Without what extremes of nothing are."""
    return tf.clip_by_value(x, -2.0, 2.0)


def _kind(kinds):
    """Register a function that takes an ``_Operation``."""

    def register(function):
        kinds.append(function)
        return function

    return register


# ---- single operations -------------------------------------------------------


@_kind(_OF_ANY)
def _number(o):
    x = o.x
    return o.one_of(
        lambda: tf.tanh(x),
        lambda: tf.zeros_like(x),
        lambda: tf.exp(-tf.abs(x)),
        lambda: x * tf.cast(_size(x), tf.float32) * 0.1,
        lambda: x + tf.random.stateless_uniform(tf.shape(x), (3, 4)) * 0.1,
    )


@_kind(_OF_ANY)
def _pair(o):
    x, y = o.x, o.y
    return o.one_of(lambda: (x + y) * 0.5, lambda: x * y)


@_kind(_OF_ROWS)
def _of_rows(o):
    x = o.x
    return o.one_of(
        lambda: tf.reduce_sum(x, 0) * 0.1,
        lambda: x * tf.reduce_mean(x, 1, keepdims=True),
        lambda: tf.concat([x[:, 1:], x[:, :1]], 1),
        lambda: x @ tf.constant([[0.3, -0.2], [0.5, 0.1]]),
    )


@_kind(_OF_ROWS)
def _across_rows(o):
    x, y, n = o.x, o.rows, _size(o.x)
    return o.one_of(
        lambda: x - tf.reduce_mean(x, 0),
        lambda: tf.nn.softmax(x @ tf.transpose(y)) @ x,
        lambda: tf.cumsum(x, 0) * 0.3,
        lambda: tf.sort(x, 0),
        lambda: tf.roll(x, 1, 0),
        lambda: x[::-1],
        lambda: tf.concat([x, y], 0)[:n] + tf.concat([y, x], 0)[-n:],
        lambda: tf.gather(tf.concat([x, y], 0), tf.range(n) * 2),
        lambda: tf.reduce_sum(tf.reshape(tf.tile(x, [1, 2]), [n, 2, 2]), 1),
        lambda: x * tf.reduce_max(x),
        lambda: x * tf.boolean_mask(y, tf.range(n) < 1),
        lambda: x * tf.gather(tf.concat([x, y], 0), tf.range(2 * n))[n:],
        lambda: tf.reduce_sum(_pairs(x, y), 0) * 0.02,
    )


# ---- rows by their numbers ---------------------------------------------------


@_kind(_OF_ROWS)
def _gathered(o):
    x, k = o.x, o.numbers()
    n, flat = tf.cast(_size(x), k.dtype), tf.reshape(x, [-1])
    column, at = k % 2, tf.range(_size(x), dtype=k.dtype)
    return o.one_of(
        lambda: tf.gather(x, k % n),
        lambda: tf.gather(x, tf.clip_by_value(k, 0, n - 1)),
        lambda: tf.gather_nd(x, tf.stack([at, column], 1))[:, None] * x,
        lambda: tf.gather_nd(x, tf.stack([k % n, column], 1))[:, None] * x,
        lambda: tf.gather(x, column, batch_dims=1)[:, None] + o.rows,
        lambda: tf.gather(flat, at * 2 + column)[:, None] * x,
        lambda: tf.gather(flat, (k * 2 + column) % (2 * n))[:, None] * x,
        lambda: (
            tf.gather_nd(x @ tf.transpose(x), tf.stack([k, at], 1) % n)[:, None]
            * x
        ),
        lambda: tf.gather(tf.eye(SEGMENTS, 2), k % SEGMENTS) * x,
        lambda: tf.tanh(tf.cast(k, tf.float32))[:, None] * x,
    )


@_kind(_OF_ROWS)
def _entries(o):
    """Some entries of rows, by their places."""
    x, y, n = o.x, o.rows, _size(o.x)
    mask = o.one_of(lambda: x > 0, lambda: tf.abs(y) > 0.3, lambda: x > y)
    at = tf.where(mask)
    some = o.one_of(
        lambda: tf.gather_nd(y, at),
        lambda: tf.boolean_mask(x, mask) * 0.5,
        lambda: tf.gather_nd(tf.tile(x, [2, n]), at[:, ::-1]),
        lambda: tf.gather(x[:, 0], at[:, 0]) * tf.gather(y[:, 1], at[:, -2]),
        lambda: tf.cast(at[:, 1], tf.float32),
    )
    wider = tf.scatter_nd(at, some, tf.cast([n + 1, 3], tf.int64))
    return o.one_of(
        lambda: tf.scatter_nd(at, some, tf.shape(x, tf.int64)),
        lambda: tf.tensor_scatter_nd_update(y, at, some),
        lambda: wider[:n, 1:],
        lambda: tf.reduce_sum(some) * 0.1 * x,
        lambda: tf.math.unsorted_segment_sum(some, at[:, 1], 2) * 0.1,
        lambda: tf.reduce_sum(tf.gather(x, tf.reshape(at, [-1]) % 1), 0) * 0.1,
        lambda: tf.reduce_sum(tf.math.segment_sum(some, at[:, 0])) * 0.1 * x,
    )


@_kind(_OF_ROWS)
def _segments(o):
    x, k, n = o.x, o.numbers(), _size(o.x)
    k = tf.cast(k, tf.int32)
    count = o.draw.choice([SEGMENTS, n, n + 1, 2 * n])
    name = o.draw.choice(["sum", "mean", "max", "min", "prod"])
    if o.draw.random() < 0.3:
        k = o.one_of(
            lambda: tf.sort(k % count),
            lambda: tf.repeat(tf.range(n), 2)[::2],
            lambda: tf.range(n) * 2 + 1,
        )
        found = getattr(tf.math, f"segment_{name}")(x, k)
    else:
        k = o.one_of(
            lambda: k % count,
            lambda: tf.where(k < count, k, -1),
            lambda: tf.minimum(k, 0) - 1,
        )
        found = getattr(tf.math, f"unsorted_segment_{name}")(x, k, count)
    found = _bounded(found)
    return o.one_of(
        lambda: tf.gather(found, tf.maximum(k, 0)),
        lambda: tf.reduce_sum(found, 0) * 0.1,
        lambda: tf.gather(found, k % _size(found)) * x,
    )


@_kind(_OF_ROWS)
def _scattered_rows(o):
    x, y, k, shape = o.x, o.rows, o.numbers(), tf.shape(o.x)
    at = (tf.cast(k, tf.int32) % shape[0])[:, None]
    return o.one_of(
        lambda: tf.scatter_nd(at, x, shape) * 0.5,
        lambda: tf.tensor_scatter_nd_add(y, at, x) * 0.5,
        lambda: tf.tensor_scatter_nd_sub(y, at, x) * 0.5,
        lambda: tf.tensor_scatter_nd_max(y, at, x),
        lambda: tf.scatter_nd(at % 2, x, [2, 2])[1] * 0.3,
    )


@_kind(_OF_ROWS)
def _masked(o):
    x, y, mask, shape = o.x, o.rows, o.mask(), tf.shape(o.x)
    some, others = tf.boolean_mask(x, mask), tf.boolean_mask(y, mask)
    number = o.one_of(
        lambda: tf.cast(tf.where(mask)[:, 0], tf.int32),
        lambda: tf.boolean_mask(tf.range(shape[0]), mask),
    )
    count = tf.cast(_size(some), tf.float32)
    some = o.one_of(
        lambda: tf.tanh(some),
        lambda: some * others,
        lambda: some - tf.reduce_sum(some, 0) / (count + 1.0),
        lambda: tf.gather(some, tf.range(_size(some))),
        lambda: some[::-1],
        lambda: some + some[:1],
        lambda: some * tf.gather(y, number),
        lambda: tf.cumsum(some) * 0.3,
    )
    return o.one_of(
        lambda: tf.scatter_nd(number[:, None], some, shape),
        lambda: tf.tensor_scatter_nd_update(x, number[:, None], some),
        lambda: tf.math.unsorted_segment_sum(some, number, shape[0]),
        lambda: tf.math.divide_no_nan(tf.reduce_sum(some, 0), count),
        lambda: _bounded(tf.reduce_max(some, 0)),
        lambda: _bounded(tf.reduce_prod(some, 0)),
        lambda: tf.reduce_sum(tf.concat([some, some * 2], 0), 0) * 0.1,
        lambda: tf.reduce_sum(tf.math.segment_sum(some, number), 0) * 0.1,
        lambda: tf.reduce_sum(tf.boolean_mask(some, some[:, 0] > 0), 0) * 0.1,
    )


@_kind(_OF_ROWS)
def _parted(o):
    x, part = o.x, tf.cast(o.numbers(), tf.int32) % 2
    one, two = tf.dynamic_partition(x, part, 2)
    places = tf.dynamic_partition(tf.range(_size(x)), part, 2)
    return o.one_of(
        lambda: tf.dynamic_stitch(places, [one * 0.5, tf.tanh(two)]),
        lambda: tf.dynamic_stitch(places[::-1], [two, one * one]),
        lambda: tf.reduce_sum(one, 0) * 0.1 - tf.reduce_sum(two * two, 0) * 0.1,
        lambda: tf.concat([one, two], 0),
    )


@_kind(_OF_ROWS)
def _ragged(o):
    x, n = o.x, _size(o.x)
    lengths = o.one_of(
        lambda: tf.maximum(o.classes, 0),
        lambda: tf.cast(o.numbers() % 3, tf.int32),
        lambda: tf.cast(o.ragged.row_lengths(), tf.int32)[::-1],
        lambda: tf.cast(tf.fill([n], 2), tf.int8),
    )
    ragged = o.one_of(
        lambda: o.ragged,
        lambda: _repeated(tf.repeat(x, lengths, axis=0), lengths),
        lambda: _repeated(
            tf.gather(x, tf.repeat(tf.range(n), lengths)), lengths
        ),
    )
    values = ragged.values
    row = ragged.value_rowids()
    ragged = ragged.with_values(
        o.one_of(
            lambda: values * 0.5,
            lambda: values * tf.gather(o.rows, row),
            lambda: tf.roll(values, 1, 0) * 0.5,
            lambda: tf.tanh(tf.cumsum(values)),
        )
    )
    count = tf.cast(ragged.row_lengths(), tf.float32)[:, None]
    return o.one_of(
        lambda: tf.reduce_sum(ragged, 1) * 0.3,
        lambda: tf.math.divide_no_nan(tf.reduce_sum(ragged, 1), count),
        lambda: _bounded(tf.reduce_max(ragged, 1)),
        lambda: ragged.to_tensor(shape=(None, 3, 2))[:, 1],
        # The mean is of the longest row of all.
        lambda: tf.reduce_mean(ragged.to_tensor(), 1) * 0.3,
        lambda: tf.reduce_sum(tf.tanh(ragged.values), 0) * 0.1,
        lambda: tf.cast(ragged.bounding_shape()[1], tf.float32) * 0.1 * x,
        lambda: tf.cast(ragged.row_splits[1:], tf.float32)[:, None] * 0.1 * x,
        lambda: tf.math.unsorted_segment_sum(ragged.values, row, n) * 0.3,
    )


# ---- branches, loops and lists -----------------------------------------------


@_kind(_NESTED)
def _function(o):
    seed = o.seed()
    return tf.function(
        lambda *given: o.inside(seed, given, o.x)[0], autograph=False
    )(o.x, *o.pool[:3])


@_kind(_NESTED)
def _branch(o):
    seed, way = o.seed(), o.draw.randrange(4)
    ways = (
        lambda: o.way,
        lambda: tf.reduce_sum(o.y) > 0,
        lambda: _size(o.y) > 2,
        lambda: tf.rank(o.y) > 1,
    )

    def branch(seed):
        return lambda: o.inside(seed, [o.x, *o.pool[:4]], o.x)[0]

    if o.draw.random() < 0.3:
        at = tf.cast(ways[way](), tf.int32) + tf.cast(o.way, tf.int32)
        return tf.switch_case(at, [branch(seed + k) for k in range(3)])
    return tf.cond(ways[way](), branch(seed), branch(seed + 1))


@_kind(_NESTED)
def _loop(o):
    seed = o.seed()
    often = o.one_of(
        lambda: o.draw.randrange(ROUNDS + 1), lambda: _size(o.classes)
    )

    def body(i, *state):
        return i + 1, *o.inside(seed, [*state, *o.pool[:4]], *state)

    found = tf.while_loop(lambda i, *_: i < often, body, (0, o.x, o.rows))
    return o.draw.choice(found[1:])


@_kind(_NESTED)
def _scan(o):
    seed, x = o.seed(), o.x
    items = tf.stack([x, x * 0.5, tf.sin(x)])
    found = tf.scan(
        lambda state, item: o.inside(seed, [state, item, *o.pool[:3]], x)[0],
        items,
    )
    return o.one_of(lambda: found[1], lambda: tf.reduce_sum(found, 0) * 0.3)


@_kind(_NESTED)
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


@_kind(_NESTED)
def _elements(o):
    """A list of tensors, by TensorFlow's own operations."""
    x, others = o.x, [p for p in o.pool if _alike(p, o.x)]
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


@_kind(_OF_ROWS)
def _rows_as_elements(o):
    """A list of which the elements are the rows of all examples."""
    x, n, items = o.x, _size(o.x), lists.list_of(o.x, [2])
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


@_kind(_NESTED_OF_ROWS)
def _map(o):
    seed = o.seed()
    others = [p for p in o.pool if p.shape.rank == 1][:2]
    found = tf.map_fn(
        lambda pair: o.inside(
            seed,
            [pair[0], tf.cast(pair[1], tf.float32) * pair[0] * 0.1, *others],
            pair[0],
        )[0],
        (o.x, tf.range(_size(o.x))),
        fn_output_signature=tf.TensorSpec((2,), tf.float32),
    )
    return found


@_kind(_NESTED_OF_ROWS)
def _scan_of_rows(o):
    seed = o.seed()
    return tf.scan(lambda state, row: o.inside(seed, [state, row], row)[0], o.x)


@_kind(_NESTED_OF_ROWS)
def _rounds(o):
    """A loop over examples, whose rounds may need those of others."""
    x, n, seed = o.x, _size(o.x), o.seed()
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
    return o.one_of(lambda: _bounded(total), lambda: found.stack())


@_kind(_OF_ROWS)
def _pushed(o):
    """A loop over examples that pops from a list, or pushes to one."""
    x, n = o.x, _size(o.x)
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


KINDS = {
    _name_of(function): function
    for kinds in (_OF_ANY, _OF_ROWS, _NESTED, _NESTED_OF_ROWS)
    for function in kinds
}
