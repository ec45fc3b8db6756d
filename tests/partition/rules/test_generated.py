"""Random programs with loops, branches and lists, against one device."""

import random

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition import kit

_ROUNDS = 3


class _Program:
    """A program that is drawn.

    Args:
        seed: of what is drawn.
    """

    def __init__(self, seed):
        self._seed = seed
        self._way = None

    def __call__(self, way, *given):
        self._way = way
        with tf.GradientTape() as tape:
            tape.watch(given)
            made = self._run(random.Random(self._seed), given, 2, 5)[-3:]
            total = tf.add_n([tf.reduce_sum(tf.sin(y)) for y in made])
        return [*made, *tape.gradient(total, given)]

    def _run(self, drawn, pool, depth, count):
        """Add some operations to what there is."""
        pool = list(pool)
        for _ in range(count):
            pool.append(self._operation(drawn, pool, depth))
        return pool

    def _operation(self, drawn, pool, depth):
        x, y = drawn.choice(pool), drawn.choice(pool)
        kinds = [self._number, self._pair]
        if x.shape.rank == 2:
            kinds.append(self._of_rows)
        if depth:
            kinds += [self._loop, self._branch]
        if depth and x.shape.rank == 2:
            kinds += [self._list, self._map]
        return drawn.choice(kinds)(drawn, x, y, pool, depth - 1)

    def _number(self, drawn, x, *_):
        functions = (
            tf.tanh,
            tf.zeros_like,
            lambda x: tf.exp(-tf.abs(x)),
            lambda x: x * tf.cast(tf.shape(x)[0], tf.float32) * 0.1,
        )
        return drawn.choice(functions)(x)

    def _pair(self, drawn, x, y, *_):
        if x.shape.rank == y.shape.rank and not _alike(x, y):
            return tf.sin(x)
        return drawn.choice((tf.add, tf.multiply))(x, y)

    def _of_rows(self, drawn, x, *_):
        functions = (
            lambda x: tf.reduce_sum(x, 0) * 0.1,
            lambda x: x * tf.reduce_mean(x, 1, keepdims=True),
            lambda x: tf.concat([x[:, 1:], x[:, :1]], 1),
            lambda x: x @ tf.constant([[0.3, -0.2], [0.5, 0.1]]),
        )
        return drawn.choice(functions)(x)

    def _inside(self, seed, pool, depth, *wanted):
        """Results of a branch or a body, with the shapes of some tensors."""
        drawn = random.Random(seed)
        made = self._run(drawn, pool, depth, drawn.randrange(1, 4))
        return [
            drawn.choice([m for m in made if _alike(m, like)][-4:])
            for like in wanted
        ]

    def _loop(self, drawn, x, y, pool, depth):
        seed, often = drawn.random(), drawn.randrange(_ROUNDS + 1)

        def body(i, *state):
            given = [*state, *pool[:4]]
            return i + 1, *self._inside(seed, given, depth, *state)

        found = tf.while_loop(lambda i, *_: i < often, body, (0, x, y))
        return drawn.choice(found[1:])

    def _branch(self, drawn, x, y, pool, depth):
        seed = drawn.random()

        def branch(seed):
            return lambda: self._inside(seed, [x, *pool[:4]], depth, x)[0]

        ways = (
            lambda: self._way[0],
            lambda: tf.reduce_sum(y) > 0,
            lambda: tf.shape(y)[0] > 2,
        )
        way = drawn.choice(ways)()
        return tf.cond(way, branch(seed), branch(seed + 1))

    def _list(self, drawn, x, y, pool, depth):
        seed = drawn.random()
        shape = drawn.choice((None, x.shape))
        options = {"clear_after_read": False}
        items = tf.TensorArray(tf.float32, _ROUNDS, **options)
        items = items.unstack(tf.stack([x, x * 0.5, tf.sin(x)]))
        given = tf.TensorArray(
            tf.float32, _ROUNDS, element_shape=shape, **options
        )

        def body(i, state, found):
            own = [state, items.read(i), *pool[:3]]
            after, item = self._inside(seed, own, depth, state, x)
            return i + 1, after, found.write(i, item)

        _, state, found = tf.while_loop(
            lambda i, *_: i < _ROUNDS, body, (0, x, given)
        )
        ends = (
            lambda: state,
            lambda: found.read(1),
            lambda: found.stack()[2],
            lambda: tf.reduce_sum(found.stack(), 0),
        )
        return drawn.choice(ends)()

    def _map(self, drawn, x, y, pool, depth):
        seed = drawn.random()
        others = [p for p in pool if p.shape.rank == 1][:2]
        return tf.map_fn(
            lambda row: self._inside(seed, [row, *others], depth, row)[0],
            x,
            fn_output_signature=tf.TensorSpec((2,), tf.float32),
        )


def _alike(a, b):
    return a.shape.as_list() == b.shape.as_list()


@pytest.mark.parametrize("seed", sample_of(range(12), 4))
def test_random_programs(seed):
    given = (
        kit.replicated(1, dtype="bool"),
        kit.sharded(-1, 2),
        kit.sharded(-1, 2),
        kit.replicated(2),
        kit.partial_sum(2),
    )
    try:
        kit.check_on_towers(
            _Program(seed),
            *given,
            towers=((3, 0, 2), (0, 1, 0)),
            seed=seed,
            tolerance=2e-3,
        )
    except kit.OneDeviceFails as error:
        pytest.skip(str(error))
