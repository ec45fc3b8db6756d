"""Random draws of a tower: its rows of the draw for the global batch.

TensorFlow's stateless random operations count: each group of numbers is a
function of the seed and of a counter. A tower therefore draws its rows alone,
by starting at a later count. Seeds are the same on all towers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import patches
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.replica_context import graphs_inside
from keras_towers.fit.context.rows import Rows
from keras_towers.fit.step import parts
from keras_towers.fit.step.unmatched import (
    of_generator,
    rows_of_draw,
    stateful,
    unmatched,
    warn,
)
from keras_towers.partition.sizes import Size, degree_of, examples_in
from keras_towers.splitting.values import Value

Dimension: TypeAlias = "int | str | tuple[int, ...] | None"
"""A dimension of a tower's tensor.

* an int: static;
* ``SAME``: not static, but the same on all towers;
* a tuple: a number of rows, in blocks one after another; block i has as many
  rows for each example as element i says;
* None: unknown.
"""

SAME = "same"

# Algorithms that are Philox on CPUs and GPUs: Philox and "auto_select".
_PHILOX = (1, 3)

# Distance between the streams of draws that have no rows of their own.
_KEY_STRIDE = 0x9E3779B97F4A7C15
_SEED_STRIDE = 1_000_003

# Draws of which XLA computes numbers by the shape, too, not by the count only.
_BY_SHAPE_IN_XLA = ("stateless_random_normal_v2",)

EAGER = "run_eagerly"
"""What is told of where draws are only taken for those of the examples."""


def replaced() -> contextlib.AbstractContextManager[None]:
    """Replace the operations that draw, inside a block."""
    return patches.held(_install)


def _install() -> None:
    # All draws end in these.
    for name, rejects in (
        ("stateless_random_uniform_v2", False),
        ("stateless_random_normal_v2", False),
        ("stateless_random_uniform_int_v2", False),
        ("stateless_random_uniform_full_int_v2", False),
        ("stateless_truncated_normal_v2", True),
    ):
        draw = counted(name, rejects)
        patches.replace(compat.stateless_ops, name, draw)
    for owner, name, shaped in (
        (compat.stateless_ops, "stateless_random_gamma_v3", "alpha"),
        (compat.seeded_ops, "stateless_random_poisson", "lam"),
        (compat.seeded_ops, "stateless_random_binomial", "counts probs"),
        (compat.seeded_ops, "stateless_multinomial", "logits"),
        (
            compat.seeded_ops,
            "stateless_parameterized_truncated_normal",
            "means stddevs minvals maxvals",
        ),
    ):
        patches.replace(owner, name, whole(name, shaped.split()))
    for owner, name in (
        (compat.keras_random, "shuffle"),
        (compat.stateless_ops, "stateless_shuffle"),
    ):
        patches.replace(owner, name, unmatched(name))
    # Stateful draws begin with these.
    patches.replace(compat.random_seeds, "get_seed", stateful)
    patches.replace(tf.random.Generator, "_prepare_key_counter", of_generator)


def counted(name: str, rejects: bool = False) -> Callable[..., tf.Tensor]:
    """Return the replacement of an operation whose counter can be advanced."""

    def draw(
        original: Callable[..., tf.Tensor], *args: Any, **kwargs: Any
    ) -> tf.Tensor:
        rows = rows_of_draw()
        if rows is None:
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if given["counter"] is rows.foreign:
            return original(**given)
        given["shape"] = tf.convert_to_tensor(given["shape"])
        plan = _plan(name, given["shape"], rows)
        if plan is None:
            return original(**_own_stream(given))
        axis, blocks = plan
        if axis is None:
            return original(**given)
        xla = _is_for_xla(rows)
        depends = xla and name in _BY_SHAPE_IN_XLA
        if axis > 0 or depends or given["alg"] not in _PHILOX:
            drawn = parts.of_whole(original, given, rows, axis, blocks)
        else:
            # XLA truncates without rejecting.
            reserves = rejects and not xla
            drawn = parts.advanced(original, given, rows, blocks, reserves)
        return rows.drawn(drawn, axis, blocks)

    return draw


def whole(name: str, shaped: Sequence[str]) -> Callable[..., tf.Tensor]:
    """Return the replacement of an operation that is drawn whole, then cut."""

    def draw(
        original: Callable[..., tf.Tensor], *args: Any, **kwargs: Any
    ) -> tf.Tensor:
        rows = rows_of_draw()
        if rows is None:
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        for key in shaped:
            given[key] = tf.convert_to_tensor(given[key])
        if "shape" in given:
            given["shape"] = tf.convert_to_tensor(given["shape"])
            shape = given["shape"]
        else:
            shape = tf.shape(given[shaped[0]], out_type=tf.int64)
        plan = _plan(name, shape, rows)
        if plan is None or (len(plan[1]) > 1):
            if plan is not None:
                _warn_unmatched(name, shape)
            return original(**_own_stream(given))
        axis, blocks = plan
        if axis is None:
            return original(**given)
        rank = shape.shape[0]
        for key in shaped:
            value = given[key]
            # A single row is either repeated for all examples or, where rows
            # are known by their number, that of the tower's only example.
            alone = rows.static == 1
            if rows.graph is None:
                alone = int(rows.count) == 1
            if value.shape.rank == rank and (value.shape[axis] != 1 or alone):
                given[key] = parts.padded(value, rows, axis, blocks[0])
        drawn = parts.of_whole(original, given, rows, axis, blocks)
        return rows.drawn(drawn, axis, blocks)

    return draw


def _is_for_xla(rows: Rows) -> bool:
    return rows.graph is not None and compat.in_xla_context(rows.graph)


def _plan(
    name: str, shape: tf.Tensor, rows: Rows
) -> tuple[int | None, tuple[int, ...]] | None:
    """Return the axis and blocks of a draw that are the tower's examples."""
    # None and no blocks if the draw is the same on all towers; None, after a
    # warning, if nobody can tell.
    found = _dimensions(shape, rows)
    axes = [a for a, d in enumerate(found or ()) if isinstance(d, tuple)]
    if found is None or None in found or len(axes) > 1:
        _warn_unmatched(name, shape)
        return None
    if rows.graph is not None:
        inside = graphs_inside(rows.graph)
        if inside is None and axes:
            _warn_unmatched(name, shape, ", in a tf.function of its own,")
            return None
        if any(isinstance(g, compat.WhileBodyFuncGraph) for g in inside or ()):
            warn(
                name,
                f"{name} of shape {_described(shape)} is drawn in a loop: it "
                "is that of one device only if the loop runs equally often on "
                "all towers, and not once for each example.",
            )
    if not axes:
        return None, ()
    blocks = found[axes[0]]
    assert isinstance(blocks, tuple)
    return axes[0], blocks


def _dimensions(shape: tf.Tensor, rows: Rows) -> list[Dimension] | None:
    tower = tower_lib.current()
    if rows.graph is not None and tower is not None:
        found = dimensions_of(tower.values.value_of(shape), shape.shape[0])
        return found if rows.static is None else _by_size(found, rows)
    known = compat.constant_value_as_shape(shape)
    if known.rank is None or None in known.as_list():
        return None
    found = known.as_list()
    if found and found[0] == rows.count:
        warn(
            EAGER,
            "run_eagerly=True: a random draw is taken for one row per example "
            "if it has as many rows as the tower has examples, as that of "
            f"shape {tuple(found)}. If it is not, it differs from one device; "
            "without run_eagerly this is known for sure.",
            once=EAGER,
        )
        found[0] = (1,)
    return found


def dimensions_of(shape: Value, rank: int | None) -> list[Dimension] | None:
    """Explain the dimensions in a shape tensor; None: of unknown rank."""
    if shape.known is not None:
        return [_dimension(entry, shape) for entry in shape.known.flat]
    if not rank:
        return None
    return [SAME if shape.is_same else None for _ in range(rank)]


def _dimension(size: Any, shape: Value) -> Dimension:
    if isinstance(size, int):
        return size
    number = examples_in(size)
    if number == 1:
        return (1,)
    if number is not None:
        order = size.order if isinstance(size, Size) else None
        outer, inner = order or (0, 0)
        return (inner,) * outer or None
    return SAME if degree_of(size) == 0 or shape.is_same else None


def _by_size(
    found: list[Dimension] | None, rows: Rows
) -> list[Dimension] | None:
    """Take a static dimension for that of the examples, by its size."""
    if not found or rows.static is None or not isinstance(found[0], int):
        return found
    warn(
        "x.shape",
        "the step needs static numbers of rows (x.shape[0]), so a random draw "
        "is taken for one row per example if it has as many rows as the tower "
        f"has examples ({rows.static}), otherwise for the same on all towers, "
        f"such as that of shape {tuple(found)}. If it is not, it differs from "
        "one device. Where the step takes all shapes from keras.ops.shape(x), "
        "this is known for sure.",
        once="static",
    )
    if found[0] == rows.static:
        return [(1,), *found[1:]]
    several = found[0] and found[0] % rows.static == 0
    return [None, *found[1:]] if several else found


def _own_stream(given: dict[str, Any]) -> dict[str, Any]:
    """Draw from the tower's own stream."""
    tower = tower_lib.current()
    assert tower is not None
    tower.differs("draws from a stream of its own")
    if "key" in given:
        offset = tower.index * _KEY_STRIDE % 2**64
        given["key"] = given["key"] + tf.constant(offset, tf.uint64)
    else:
        seed = tf.convert_to_tensor(given["seed"])
        offsets = [tower.index * _SEED_STRIDE, 0]
        given["seed"] = seed + tf.constant(offsets, seed.dtype)
    return given


def _warn_unmatched(name: str, shape: tf.Tensor, where: str = "") -> None:
    warn(
        name,
        f"{name} of shape {_described(shape)}{where} differs from one device: "
        "it is not known which of its rows belong to which examples. Every "
        "tower draws it from its own stream.",
    )


def _described(shape: tf.Tensor) -> str:
    return str(compat.constant_value_as_shape(shape)).replace("None", "?")
