"""Batches of towers: a global batch split, or one batch for each tower.

``epoch_iterator.py`` and ``fit/step/graph/step_inputs.py`` use them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.context import step_errors
from keras_towers.fit.places import Places
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure

_ARGUMENTS = ("x", "y", "sample_weight")
_SPLIT = (
    "Towers divide the parts that have one row per example, and each tower "
    "gets the other parts whole. To tell these apart, keras_towers needs "
    "static shapes (drop_remainder=True, tf.ensure_shape), or different "
    "numbers of rows in the first steps of a call."
)
EACH: str = (
    'With batches="each", every part needs one row per example. With '
    'batches="split", every tower can get other parts whole.'
)

Leaf: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"
"""A tensor of any kind, or its spec."""

Count: TypeAlias = "int | tf.Tensor"
"""A number of rows, known now or in the step only."""

# By the names of a batch's parts: those that have no row for each example.
WholeParts = Mapping[tuple[str, ...], Collection[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A batch, or its specs, with a note of which parts towers divide.

    Attributes:
        structure: dense, ragged or sparse tensors of shape [examples, ...], or
            other values, as the model gets them.
        names: the name of each leaf, as in ``fit(x, y)``.
        divided: for each leaf, whether it has a row for each example.
    """

    structure: Structure
    names: tuple[str, ...]
    divided: Sequence[bool]

    @classmethod
    def of(
        cls, structure: Structure, undivided: WholeParts | None = None
    ) -> Batch:
        """Find which parts of a batch, or of specs, have a row per example.

        A part whose number of rows is known only at run time is assumed to have
        one, unless an earlier batch has shown otherwise. If this is wrong, the
        step fails.

        Args:
            structure: the batch.
            undivided: what earlier batches have shown.
        """
        names = _names_of(structure)
        known = (undivided or {}).get(names, ())
        named = zip(names, tf.nest.flatten(structure), strict=True)
        leaves = [None if name in known else leaf for name, leaf in named]
        example = _with_examples(tf.nest.pack_sequence_as(structure, leaves))
        rows = None if example is None else static_rows(example)
        divided = [
            leaf is not None
            and has_rows(leaf)
            and static_rows(leaf) == rows
            and can_be_divided(leaf)
            for leaf in leaves
        ]
        return cls(structure, names, divided)

    def with_structure(self, structure: Structure) -> Batch:
        """Return another batch, or its specs, that is divided like this one."""
        return dataclasses.replace(self, structure=structure)

    @property
    def leaves(self) -> list[Structure]:
        """The tensors of the batch; None for those that are left out."""
        return tf.nest.flatten(self.structure)

    @property
    def has_rows_only(self) -> bool:
        """Whether every part has a row for each example."""
        parts = zip(self.leaves, self.divided, strict=True)
        return all(is_divided for leaf, is_divided in parts if leaf is not None)

    @property
    def _example(self) -> Leaf | None:
        for leaf in itertools.compress(self.leaves, self.divided):
            return leaf
        return _with_examples(self.structure)

    @property
    def size(self) -> Count:
        """The number of examples; a batch without rows is one example."""
        example = self._example
        return 1 if example is None else rows_of(example)

    @property
    def static_size(self) -> int | None:
        """The static number of examples."""
        example = self._example
        return None if example is None else static_rows(example)

    def undivided(self) -> set[str]:
        """Return the parts that have other numbers of rows; eager only."""
        size = int(self.size)
        return {
            name
            for name, leaf in zip(self.names, self.leaves, strict=True)
            if has_rows(leaf) and int(rows_of(leaf)) != size
        }

    def specs(self, any_size: bool = False) -> Batch:
        """Return the specs; with ``any_size`` for any number of rows."""

        def spec_of(leaf: Leaf | None) -> tf.TypeSpec | None:
            if leaf is None:
                return None
            spec = tf.type_spec_from_value(leaf)
            return of_any_size(spec) if any_size and has_rows(leaf) else spec

        return self.with_structure(
            tf.nest.map_structure(spec_of, self.structure)
        )

    def map_divided(self, function: Callable[[Leaf], Structure]) -> Structure:
        """Return the batch with a function applied to its divided parts."""
        leaves = [
            function(leaf) if is_divided else leaf
            for leaf, is_divided in zip(self.leaves, self.divided, strict=True)
        ]
        return tf.nest.pack_sequence_as(self.structure, leaves)

    def cut(self, starts: Sequence[Count]) -> tuple[object, ...]:
        """Cut the batch into N pieces; each gets all undivided parts.

        Args:
            starts: the first row of each piece, and the end of the last.
        """

        def piece(start: Count, end: Count) -> Structure:
            return self.map_divided(lambda x: _slice(x, start, end - start))

        return tuple(itertools.starmap(piece, itertools.pairwise(starts)))

    def split(self, replicas: int, first: int, towers: int) -> TowerBatch:
        """Split a global batch into pieces whose sizes differ by at most one.

        Args:
            replicas: the number of towers that have parts of it.
            first: the first tower to return a piece for.
            towers: the number of pieces to return.
        """
        size = self.size
        if not isinstance(size, int):
            with tf.control_dependencies(self.check_rows(_SPLIT)):
                size = tf.cast(tf.identity(size), tf.int64)
        starts = _starts(size, replicas)[first : first + towers + 1]
        return TowerBatch(self.cut(starts), size, starts[0])

    def check_rows(
        self, advice: str, undivided: bool = False
    ) -> list[tf.Operation]:
        """Return assertions that parts have equally many rows.

        Args:
            advice: the end of the error message, which says what to do.
            undivided: whether to check all parts that have rows.
        """
        chosen = map(has_rows, self.leaves) if undivided else self.divided
        named = zip(self.names, self.leaves, chosen, strict=True)
        leaves = {name: leaf for name, leaf, is_chosen in named if is_chosen}
        # Static numbers that are equal need no check at run time.
        static = set(map(static_rows, leaves.values()))
        if len(leaves) < 2 or (len(static) == 1 and None not in static):
            return []
        listed = ", ".join(f"{name} has {{}}" for name in leaves)
        # An accelerator would have to be waited for.
        with tf.device(compat.HOST):
            counts = [tf.cast(rows_of(v), tf.int64) for v in leaves.values()]
            return step_errors.assert_for_user(
                tf.reduce_all(tf.stack(counts) == counts[0]),
                "the parts of a batch have different numbers of rows: "
                f"{listed}. {advice} A dataset of single examples needs "
                ".batch(n).",
                counts,
            )

    def refuse_without_rows(self) -> None:
        """Reject a tower's own batch if a part of it cannot be divided.

        Each tower's batch has such a part, but one device could use only one of
        them.
        """
        for name, leaf in zip(self.names, self.leaves, strict=True):
            is_value = isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant
            if is_value and not has_rows(leaf):
                raise TowerError(f"part {name} of a batch has no rows. {EACH}")
            if has_rows(leaf) and not can_be_divided(leaf):
                raise TowerError(
                    f"part {name} of a batch is ragged in several axes, so "
                    f"towers cannot divide it. {EACH}"
                )


class TowerBatch(NamedTuple):
    """The data of one step for the K towers of this process.

    Attributes:
        pieces: the K towers' pieces of the batch; some may have no examples.
        total: the number of examples of all processes; (): not yet counted.
        start: the number of examples of the processes before this one.
    """

    pieces: tuple[Structure, ...]
    total: Count | tuple[()] = ()
    start: Count | tuple[()] = ()

    @property
    def is_counted(self) -> bool:
        """Whether the number of examples of all processes is known."""
        return not isinstance(self.total, tuple)

    def counts(self, like: Batch) -> list[Count]:
        """Return the K towers' numbers of examples: ints or scalar tensors.

        Args:
            like: a batch that is divided like the pieces.
        """
        return [like.with_structure(piece).size for piece in self.pieces]

    def in_micro_batches(self, number: int, like: Batch) -> TowerBatch:
        """Cut each tower's piece into micro-batches, in tower order.

        Args:
            number: the number of micro-batches of each tower.
            like: a batch that is divided like the pieces.
        """
        if number == 1:
            return self
        pieces: list[Structure] = []
        for piece in map(like.with_structure, self.pieces):
            pieces += piece.cut(_starts(piece.size, number))
        return self._replace(pieces=tuple(pieces))


def of_any_size(spec: Any) -> tf.TypeSpec:
    """Return the spec of a tensor of any kind with any number of rows."""
    return spec._unbatch()._batch(None)


def _starts(size: Any, number: int) -> list[Count]:
    """Return the first row of each of N pieces, and the end of the last."""
    least, left = size // number, size % number
    smaller: Any = min if isinstance(left, int) else tf.minimum
    return [k * least + smaller(left, k) for k in range(number + 1)]


def _as_tensor(leaf: Any) -> Structure:
    kinds = (tf.experimental.Optional, tf.experimental.ExtensionType)
    if leaf is None or isinstance(leaf, kinds) or tf.is_tensor(leaf):
        return leaf
    return tf.convert_to_tensor(leaf)


def _slice(leaf: Leaf, start: Count, length: Count) -> Leaf:
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        begin = tf.concat([[start], tf.zeros_like(shape[1:])], 0)
        size = tf.concat([[length], shape[1:]], 0)
        piece = tf.sparse.slice(leaf, begin, size)
        piece = tf.sparse.reset_shape(piece, size)
        if leaf.shape.rank is not None:
            piece.set_shape([None, *leaf.shape[1:]])
        return piece
    return leaf[start : start + length]


def rows_if(batch: Structure, condition: tf.Tensor) -> Structure:
    """Return all rows of a batch, or no rows."""

    def rows_if_of_leaf(leaf: Leaf) -> Leaf:
        if not has_rows(leaf):
            return leaf
        rows = tf.cast(rows_of(leaf), tf.int64)
        return _slice(leaf, tf.zeros_like(rows), tf.where(condition, rows, 0))

    return tf.nest.map_structure(rows_if_of_leaf, batch)


def is_whole(batch: Structure) -> bool:
    """Whether a batch is a global batch that is not split yet."""
    return not isinstance(batch, TowerBatch) and not any(
        isinstance(leaf, compat.PerReplica) for leaf in tf.nest.flatten(batch)
    )


def as_tower_batch(
    config: TowerConfig,
    places: Places,
    batch: Structure,
    undivided: WholeParts | None = None,
) -> tuple[TowerBatch, Batch]:
    """Convert whatever Keras passes to a step into a ``TowerBatch``.

    Args:
        config: the towers.
        places: those that have parts of it.
        batch: a global batch, or the towers' pieces of one.
        undivided: the parts that are known to have no rows.

    Returns:
        The towers' pieces, and the batch, or a piece, that they are divided
        like.
    """
    towers, is_own = places.towers, config.options.batches == "each"
    if is_whole(batch):
        whole = Batch.of(tf.nest.map_structure(_as_tensor, batch), undivided)
        if is_own:
            return TowerBatch(whole.split(towers, 0, towers).pieces), whole
        replicas, first = places.replicas, places.first_tower
        return whole.split(replicas, first, towers), whole
    if not isinstance(batch, TowerBatch):
        batch = TowerBatch(
            tuple(compat.select_replica(k, batch) for k in range(towers))
        )
        is_own = True
    pieces = [Batch.of(piece, undivided) for piece in batch.pieces]
    if is_own and places.replicas > 1:
        pieces[0].refuse_without_rows()
    checks = [c for p in pieces for c in p.check_rows(EACH, undivided=True)]
    with tf.control_dependencies(checks):
        return identity_of(batch), pieces[0]


def identity_of(structure: Structure) -> Structure:
    """Return a structure with an identity of each of its tensors."""
    return tf.nest.map_structure(
        lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf,
        structure,
        expand_composites=True,
    )


def tensors_in(structure: Structure) -> list[tf.Tensor]:
    """Return the tensors of a structure, with the components of ragged ones."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def _with_examples(batch: Structure) -> Structure:
    """Return a part of a batch, or spec, whose rows are the examples, or None.

    It is a target with as many rows as an input, or else one of the parts that
    share the most common number of rows. A part that cannot be divided does not
    show a tower's number of rows, so it is returned only if there is no other
    part.
    """
    parts = _numbered(batch)
    if not parts:
        return next(filter(has_rows, tf.nest.flatten(batch)), None)
    if type(batch) is tuple and len(batch) > 1:
        inputs = {rows for rows, _ in _numbered(batch[0])}
        targets = [p for p in _numbered(batch[1]) if p[0] in inputs]
        parts = targets or parts
    counts = Counter(rows for rows, _ in parts)
    # Where it is a tie, a number that is always the same is a table's.
    _, leaf = max(parts, key=lambda part: (counts[part[0]], part[0] is None))
    return leaf


def _numbered(batch: Structure) -> list[tuple[int | None, Leaf]]:
    """Return the parts that towers can divide, with static numbers of rows."""
    return [
        (static_rows(leaf), leaf)
        for leaf in tf.nest.flatten(batch)
        if has_rows(leaf) and can_be_divided(leaf)
    ]


def static_rows(leaf: Leaf) -> int | None:
    """Return the static number of rows of a part, or spec, that has rows."""
    return tf.TensorShape(leaf.shape)[0]


def can_be_divided(leaf: object) -> bool:
    """Whether towers can divide a part of a batch that has rows, or its spec.

    A tensor that is ragged in several axes is not divided.
    """
    return getattr(leaf, "ragged_rank", 1) == 1


def rows_of(leaf: Leaf) -> Count:
    """Return the number of rows of any kind of tensor: an int if known."""
    rows = static_rows(leaf)
    if rows is not None:
        return rows
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def _names_of(batch: Structure) -> tuple[str, ...]:
    """Return names for the leaves of a batch, as in ``fit(x, y)``."""
    names = []
    for path, _ in keras.tree.flatten_with_path(batch):
        first, *rest = path or (0,)
        if isinstance(batch, tuple) and len(batch) <= len(_ARGUMENTS):
            name = _ARGUMENTS[first]
        else:
            rest, name = [first, *rest] if path else [], "x"
        names.append(name + "".join(f"[{step!r}]" for step in rest))
    return tuple(names)


def has_rows(leaf: object) -> bool:
    """Whether a part of a batch, or its spec, has rows."""
    shape = getattr(leaf, "shape", None)
    return shape is not None and tf.TensorShape(shape).rank not in (0, None)
