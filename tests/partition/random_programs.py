"""Programs that are drawn: operations on rows, within loops and branches.

A program has tensors of one row for each example, [n, 2], and of none, [2]. An
operation takes some of them and returns another one. In between it may have any
other rows: those that a mask leaves, segments, entries of ragged rows, pairs of
examples, elements of lists. Numbers stay small, and rounding with them.
"""

import random

import tensorflow as tf

from tests.partition import kit, random_loops as loops, random_rows as rows
from tests.partition.random_kinds import SEGMENTS, are_alike, name_of, size_of

OF_ROWS = [*rows.OF_ROWS, *loops.OF_ROWS]
KINDS = {
    name_of(function): function
    for kind in (rows.OF_ANY, OF_ROWS, loops.NESTED, loops.NESTED_OF_ROWS)
    for function in kind
}
# Branches and loops are within one another, but for one.
DEPTH = 2
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
        self.drawn.append(name_of(function))
        found = function(_Operation(self, draw, x, y, pool, depth - 1))
        found.set_shape([None, 2] if found.shape.rank == 2 else [2])
        return found

    def _choose(self, draw, x, depth):
        """Choose what becomes of a tensor."""
        kinds = [rows.OF_ANY]
        if x.shape.rank == 2:
            kinds += 3 * [OF_ROWS]
        if depth:
            kinds.append(loops.NESTED)
        if depth and x.shape.rank == 2:
            kinds.append(loops.NESTED_OF_ROWS)
        return draw.choice(draw.choice(kinds))

    def inside(self, seed, pool, depth, *wanted):
        """Results of a branch or a body, with the shapes of some tensors."""
        draw = random.Random(seed)
        made = self._run(draw, pool, depth, draw.randrange(1, 4))
        return [
            draw.choice([m for m in made if are_alike(m, like)][-4:])
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
        self.rows = draw.choice([p for p in pool if are_alike(p, x)])
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
        n = size_of(self.x)
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
            lambda: tf.range(size_of(x)) < 1,
            lambda: x[:, 1] >= tf.reduce_max(x[:, 1]),
            lambda: tf.reduce_sum(x, 1) > 9,
        )
