"""Variables in shards: every tower has its own rows of one axis.

The first stage of ZeRO divides the optimizer's state in this way, and the third
stage, like FSDP, the weights, too (Rajbhandari et al., "ZeRO: memory
optimizations toward training trillion parameter models", SC 2020).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.context import thread_state
from keras_towers.partition.layouts import InShards, MeshLayout
from keras_towers.system import return_freed_memory
from keras_towers.transport import Transport, next_key

# A smaller variable is whole on every tower: an exchange of its own would cost
# more than its memory is worth.
SMALLEST_BYTES = 2**16


def choose_layout(
    shape: Sequence[int], item_bytes: int, towers: int
) -> MeshLayout | None:
    """Return how a variable is divided; None: it is whole on every tower.

    Along the longest of the axes that divide evenly; without one, along the
    first that has a row for every tower.

    Args:
        shape: the shape of the variable.
        item_bytes: the bytes of an entry.
        towers: the number of towers of all processes.
    """
    size = item_bytes * math.prod(shape)
    if towers == 1 or size < SMALLEST_BYTES:
        return None
    long = [a for a, length in enumerate(shape) if length >= towers]
    even = [a for a in long if not shape[a] % towers]
    if even:
        axis = max(even, key=lambda axis: shape[axis])
        rows = InShards(axis, shape[axis], shape[axis] // towers)
        return MeshLayout(towers=rows)
    if not long:
        return None
    return MeshLayout(towers=InShards(long[0], shape[long[0]]))


def share_counts(size: int, towers: int) -> list[int]:
    """Return the numbers of rows of K towers; they differ by 1 at most."""
    ends = [size * k // towers for k in range(towers + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


class OnAnotherRankError(TowerError, AttributeError):
    """The value of a variable is on another rank."""


class ShardedVariable(compat.UninitializedVariable):
    """A variable in shards: to its users, an ordinary one.

    Its own handle has no memory. A step that is being traced uses it for the
    whole, which the layout then divides. Elsewhere, the whole is put together
    on the host for each use, and what is written is divided again.

    Of several ranks, each has the shards of its own towers. They also hold the
    whole on the host, from its creation on and whenever they gather it, until
    they go on with a step that writes it.

    Args:
        original: the variable to divide. Its value is not freed.
        layout: how it is divided.
        mesh: for each of K towers, the devices of its columns. If towers do not
            divide it, each tower here has a copy.
        rank: the rank of this process.
        ranks: the number of processes, with K towers each.
        path: the name of the variable in errors.

    Attributes:
        layout: how it is divided.
        is_remote: whether other ranks have some of its shards.
        shards: for each of K towers, a variable for each of its columns.
        is_common: whether the ranks have agreed on its value. Until then the
            whole that a rank holds is its own.
        is_lost: whether training has ended without the whole.
    """

    def __init__(
        self,
        original: tf.Variable,
        layout: MeshLayout,
        mesh: Sequence[Sequence[str]],
        rank: int = 0,
        ranks: int = 1,
        path: str = "",
    ):
        name = original.name.split(":")[0]
        number = len(mesh)
        # The rows of earlier ranks, of each tower here, and of later ranks.
        self._counts: list[int] = []
        if layout.towers is not None:
            counts = share_counts(layout.towers.size, number * ranks)
            first, last = rank * number, (rank + 1) * number
            before, after = sum(counts[:first]), sum(counts[last:])
            self._counts = [before, *counts[first:last], after]
        self._path = path
        self.is_remote: bool = ranks > 1 and layout.towers is not None
        self.layout: MeshLayout = layout
        # Whether its handle has the whole, for the moment or until steps write.
        self._is_filled = self._has_whole = False
        self.is_common: bool = False
        self.is_lost: bool = False
        with tf.init_scope(), compat.single_device_mode():
            with tf.device(compat.HOST):
                super().__init__(
                    trainable=original.trainable,
                    name=name,
                    shape=original.shape,
                    dtype=original.dtype,
                )
                # What its handle holds may be empty.
                self._validate_shape = False
                whole = original.read_value()
                if self.is_remote:
                    self._has_whole = True
                    self._overwrite(whole)
            columns = len(mesh[0]) if layout.columns is not None else 1
            self.shards: list[list[tf.Variable]] = [[] for _ in mesh]
            for (tower, column), own in self._parts(whole, len(mesh), columns):
                with tf.device(mesh[tower][column]):
                    shard = tf.Variable(own, trainable=False, name=name)
                self.shards[tower].append(shard)
        # Optimizers look up slots by it.
        self._unique_id = original._unique_id

    @property
    def handles(self) -> list[list[Any]]:
        """The handles of the shards, for each tower and its columns."""
        return [[shard.handle for shard in row] for row in self.shards]

    def _parts(
        self, whole: tf.Tensor, towers: int, columns: int
    ) -> Iterator[tuple[tuple[int, int], tf.Tensor]]:
        """Yield each tower and column with its part, one at a time."""
        begins = [*itertools.accumulate(self._counts)]
        for tower, column in itertools.product(range(towers), range(columns)):
            begin, size = [0] * self.shape.rank, self.shape.as_list()
            rows, own = self.layout.towers, self.layout.columns
            if rows is not None:
                begin[rows.axis] = begins[tower]
                size[rows.axis] = self._counts[tower + 1]
            if own is not None:
                size[own.axis] //= columns
                begin[own.axis] = column * size[own.axis]
            with tf.device(compat.HOST):
                part = tf.slice(whole, begin, size)
            yield (tower, column), part

    def _rows(self) -> list[tf.Tensor]:
        """Return what each tower has, or one of them if all have the same."""
        towers, columns = self.layout.towers, self.layout.columns
        rows = self.shards if towers else self.shards[:1]
        if columns is None:
            return [row[0].read_value() for row in rows]
        return [
            tf.concat([shard.read_value() for shard in row], columns.axis)
            for row in rows
        ]

    @property
    def is_absent(self) -> bool:
        """Whether only all ranks together have the value."""
        return self.is_remote and not self._has_whole

    def is_initialized(self, name: str | None = None) -> Any:
        """Return whether it has a value: always."""
        return tf.constant(True, name=name)

    def gather(self, transport: Transport) -> None:
        """Hold the whole on the host of every rank. Collective."""
        towers, rank = self.layout.towers, self.shape.rank
        if not self.is_absent or towers is None:
            return
        axis = towers.axis
        order = [axis, *(a for a in range(rank) if a != axis)]
        with tf.device(compat.HOST):
            rows = [tf.identity(row) for row in self._rows()]
            first = tf.transpose(tf.concat(rows, axis), order)
            whole = transport.all_gather(first, next_key("shards"))
            back = [order.index(a) for a in range(rank)]
            self._overwrite(tf.transpose(whole, back))
        self._has_whole = True

    def drop(self) -> None:
        """Free the whole before steps that write the shards."""
        if self.is_remote and self._has_whole and self.is_common:
            with tf.init_scope(), tf.device(compat.HOST):
                self._overwrite(tf.zeros([0], self.dtype))
            self._has_whole = False

    @contextlib.contextmanager
    def _as_whole(self, writes: bool, reads: bool) -> Iterator[None]:
        """Give its handle the whole in a block; then divide what is written."""
        if self._is_filled or _stands_for_whole():
            yield
            return
        if self.is_absent and (reads or not self.is_lost):
            self._refuse()
        keeps, towers = self._has_whole or self.is_lost, self.layout.towers
        self._is_filled = True
        # A device may be too small for the whole.
        with tf.device(compat.HOST):
            try:
                if reads and not keeps:
                    first, *others = rows = self._rows()
                    if towers is not None and others:
                        first = tf.concat(rows, towers.axis)
                    self._overwrite(first)
                yield
                self._has_whole = keeps
                if writes:
                    self._divide_again()
            finally:
                self._is_filled = False
                # A graph keeps the shape of what is assigned.
                if not keeps and tf.executing_eagerly():
                    self._overwrite(tf.zeros([0], self.dtype))
                    if writes:
                        return_freed_memory()

    def _divide_again(self) -> None:
        """Give the shards the rows of the whole that the handle has."""
        whole = self._read_variable_op()
        number = len(self.shards), len(self.shards[0])
        for (tower, column), own in self._parts(whole, *number):
            shard = self.shards[tower][column]
            with tf.device(shard.device):
                shard.assign(own, read_value=False)

    def _overwrite(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def _refuse(self) -> NoReturn:
        name = self._path or self.name
        if self.is_lost:
            raise OnAnotherRankError(
                f"variable {name!r} has no value: each rank had its part of it "
                "when training ended with an error. Load the model from a "
                "checkpoint."
            )
        raise OnAnotherRankError(
            f"variable {name!r} cannot be read or written between two "
            "steps: each rank has its part of it. All ranks have it from the "
            "end of an epoch to the beginning of the next one, after "
            "evaluate(), and when the strategy's block ends. Save then (for "
            'Keras\'s callbacks: save_freq="epoch").'
        )


def _stands_for_whole() -> bool:
    """Whether a graph uses the handle of a variable in shards for the whole.

    In a step the layout divides it, and in a file it is an ordinary variable.
    """
    in_step = thread_state.current_step() is not None
    in_file = thread_state.exporting.get() or compat.is_saving()
    return bool(in_step or in_file) and not tf.executing_eagerly()


def _method(name: str, writes: bool) -> Callable[..., Any]:
    """Return a method of plain variables for variables in shards."""
    original = getattr(compat.BaseResourceVariable, name)

    @functools.wraps(original)
    def method(variable: ShardedVariable, *args: Any, **kwargs: Any) -> Any:
        with variable._as_whole(writes, reads=name != "assign"):
            result = original(variable, *args, **kwargs)
        # What reads its handle later would find nothing there.
        is_same = getattr(result, "handle", None) is variable.handle
        return variable if is_same else result

    return method


def _names_of_methods() -> Iterator[tuple[str, bool]]:
    """Yield the methods that use the handle, and whether they write."""
    for name in ("_read_variable_op", "sparse_read", "gather_nd"):
        yield name, False
    yield "_restore_from_tensors", True
    yield "count_up_to", True
    plain = compat.BaseResourceVariable
    for name in dir(plain):
        is_method = inspect.isfunction(inspect.getattr_static(plain, name))
        is_write = name.startswith(("assign", "batch_scatter", "scatter"))
        if is_method and (is_write or name == "_strided_slice_assign"):
            yield name, True


for _name, _writes in _names_of_methods():
    setattr(ShardedVariable, _name, _method(_name, _writes))
