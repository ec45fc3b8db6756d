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
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from keras_towers.fit.context import thread_state
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.foundation.system import return_freed_memory
from keras_towers.partition.ir.layouts import InShards, MeshLayout
from keras_towers.transport import Transport, next_key

# A smaller variable is whole on every tower: an exchange of its own would cost
# more than its memory is worth.
SMALLEST_BYTES = 2**16

# The C library keeps no larger value that was freed.
_LARGEST_KEPT = 2**25
# The bytes of the wholes that were freed since it has returned such memory.
_freed: list[int] = []


def choose_layout(
    shape: Sequence[int], item_bytes: int, towers: int
) -> MeshLayout:
    """Return the layout of a variable in shards.

    It is divided along the longest of the axes that divide evenly; if there is
    none, along the first axis with a row for every tower.

    Args:
        shape: the shape of the variable.
        item_bytes: the bytes of an entry.
        towers: the number of towers of all processes.
    """
    size = item_bytes * math.prod(shape)
    if towers == 1 or size < SMALLEST_BYTES:
        return MeshLayout()
    long = [a for a, length in enumerate(shape) if length >= towers]
    even = [a for a in long if not shape[a] % towers]
    if even:
        axis = max(even, key=lambda axis: shape[axis])
        rows = InShards(axis, shape[axis], shape[axis] // towers)
        return MeshLayout(towers=rows)
    if not long:
        return MeshLayout()
    return MeshLayout(towers=InShards(long[0], shape[long[0]]))


def share_counts(size: int, towers: int) -> list[int]:
    """Return the numbers of rows of K towers; they differ by 1 at most."""
    ends = [size * k // towers for k in range(towers + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def part_of(
    whole: tf.Tensor, begin: Sequence[int], size: Sequence[int]
) -> tf.Tensor:
    """Return a part of a tensor as a copy, which lets the rest be freed."""
    # Rows that follow one another in memory would be a view.
    return tf.raw_ops.DeepCopy(x=tf.slice(whole, begin, size))


class VariablePart(NamedTuple):
    """A part of a variable in this process, or all of it.

    Attributes:
        begin: for each axis the first index, as for ``tf.slice``.
        size: for each axis the length.
        copies: the variables that have it, each on its device.
        devices: those of the towers that have them: towers may share the memory
            of one of these.
    """

    begin: list[int]
    size: list[int]
    copies: list[tf.Variable]
    devices: list[str]

    def assign(self, value: tf.Tensor) -> None:
        """Write a value into all copies."""
        for copy in self.copies:
            with tf.device(copy.device):
                copy.assign(value, read_value=False)


class Access(Protocol):
    """Reads and writes variables together with the other ranks."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def register(self, variable: ShardedVariable) -> None:
        """Let ranks find a variable by its place."""

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """Return the whole of a variable, on the host. Collective."""
        ...

    def write(self, variable: ShardedVariable, whole: tf.Tensor) -> None:
        """Divide a new value of a variable. Collective."""


class NoValueError(TowerError, AttributeError):
    """Raised if a variable has no value, or none that can be read here."""


class ShardedVariable(compat.UninitializedVariable):
    """A variable in shards; its users see an ordinary one.

    Its own handle has no memory. A step that is being traced uses the handle
    for the whole value, which the layout then divides. Elsewhere, each use puts
    the whole together on the host, and each write divides it again.

    Each of several ranks has the shards of its own towers. They read and write
    the variable together (``joint_access.py``), and none keeps the whole.

    Args:
        like: a variable with its name, shape and dtype.
        part: returns the initial value of a part, given for each axis where it
            begins, and its length.
        layout: how it is divided.
        mesh: for each of K towers, the devices of its columns.
        device: the one that has all shards; empty: each is on its own.
        access: how ranks read and write it together, if each has rows of it.
        place: names it, equally on all ranks.
        path: its name in errors.

    Attributes:
        layout: how it is divided.
        is_remote: whether other ranks have some of its shards.
        place: names it, equally on all ranks.
        path: its name in errors.
        shards: for each of K towers, a variable for each of its columns.
        is_lost: whether training has ended with an error while each rank had
            its part.
    """

    def __init__(
        self,
        like: Any,
        part: Callable[[Sequence[int], Sequence[int]], tf.Tensor],
        layout: MeshLayout,
        mesh: Sequence[Sequence[str]],
        device: str = "",
        access: Access | None = None,
        place: str = "",
        path: str = "",
    ):
        name = like.name.split(":")[0]
        number = len(mesh)
        self.is_remote: bool = access is not None and layout.rows is not None
        self.access: Access | None = access
        rank, ranks = (access.rank, access.size) if access else (0, 1)
        # The rows of earlier ranks, of each tower here, and of later ranks.
        self._mesh = mesh
        self._counts: list[int] = []
        if layout.rows is not None:
            counts = share_counts(layout.rows.size, number * ranks)
            first, last = rank * number, (rank + 1) * number
            before, after = sum(counts[:first]), sum(counts[last:])
            self._counts = [before, *counts[first:last], after]
        self.place, self.path = place, path
        self.layout: MeshLayout = layout
        # How many blocks use its handle, whether that has the whole, and the
        # graphs that are traced within a use.
        self._uses, self._has_whole = 0, False
        # Held while its handle gets the whole, or loses it.
        self._filling = threading.RLock()
        self._used_in: list[tf.Graph] = []
        self._restore: Callable[[tf.Tensor], tf.Variable] | None = None
        self._restored: tf.Variable | None = None
        self.is_lost: bool = False
        with tf.init_scope(), compat.single_device_mode():
            with tf.device(compat.HOST):
                super().__init__(
                    trainable=like.trainable,
                    name=name,
                    shape=like.shape,
                    dtype=tf.as_dtype(like.dtype),
                )
                # The value at its handle may be empty.
                self._validate_shape = False
            columns = len(mesh[0]) if layout.columns is not None else 1
            self.shards: list[list[tf.Variable]] = [[] for _ in mesh]
            for tower, column in itertools.product(
                range(number), range(columns)
            ):
                with tf.device(compat.HOST):
                    own = part(*self._bounds(tower, column, columns))
                with tf.device(device or mesh[tower][column]):
                    shard = tf.Variable(own, trainable=False, name=name)
                del own
                self.shards[tower].append(shard)
        if access is not None and self.is_remote:
            access.register(self)

    @property
    def handle(self) -> tf.Tensor:
        """Its own handle; after the block, that of the ordinary variable."""
        restored = self._restored
        return self._handle if restored is None else restored.handle

    @property
    def handles(self) -> list[list[Any]]:
        """The handles of the shards, for each tower and its columns."""
        return [[shard.handle for shard in row] for row in self.shards]

    @property
    def parts(self) -> list[VariablePart]:
        """The parts in this process; an undivided part has copies."""
        parts: dict[tuple[int, ...], VariablePart] = {}
        for tower, row in enumerate(self.shards):
            for column, shard in enumerate(row):
                begin, size = self._bounds(tower, column, len(row))
                part = VariablePart(begin, size, [], [])
                part = parts.setdefault((*begin,), part)
                part.copies.append(shard)
                part.devices.append(self._mesh[tower][column])
        return [*parts.values()]

    def _bounds(
        self, tower: int, column: int, columns: int
    ) -> tuple[list[int], list[int]]:
        """Return where a column's part begins, and its size."""
        begin, size = [0] * self.shape.rank, self.shape.as_list()
        rows, own = self.layout.rows, self.layout.columns
        if rows is not None:
            begin[rows.axis] = sum(self._counts[: tower + 1])
            size[rows.axis] = self._counts[tower + 1]
        if own is not None:
            size[own.axis] //= columns
            begin[own.axis] = column * size[own.axis]
        return begin, size

    def _rows(self) -> list[tf.Tensor]:
        """Return each tower's rows, or one entry if all have the same."""
        columns = self.layout.columns
        rows = self.shards if self.layout.rows else self.shards[:1]
        if columns is None:
            return [_read(row[0]) for row in rows]
        return [tf.concat([*map(_read, row)], columns.axis) for row in rows]

    def is_initialized(self, name: str | None = None) -> Any:
        """Return whether it has a value, which is always so."""
        return tf.constant(True, name=name)

    def gather(self, transport: Transport) -> tf.Tensor:
        """Return the whole value on the host of each rank. Collective."""
        divided, rank = self.layout.rows, self.shape.rank
        assert divided is not None
        axis = divided.axis
        order = [axis, *(a for a in range(rank) if a != axis)]
        with tf.device(compat.HOST):
            rows = [tf.identity(row) for row in self._rows()]
            first = tf.transpose(tf.concat(rows, axis), order)
            del rows
            number = len(self.shards)
            each = share_counts(divided.size, number * transport.size)
            ends = range(0, len(each), number)
            counts = [sum(each[k : k + number]) for k in ends]
            whole = transport.all_gather(first, next_key("shards"), counts)
            del first
            return tf.transpose(whole, [order.index(a) for a in range(rank)])

    def divide(self, whole: tf.Tensor) -> None:
        """Write a whole value into the shards of this process."""
        for part in self.parts:
            with tf.device(compat.HOST):
                own = part_of(whole, part.begin, part.size)
            part.assign(own)

    def leave_block(self, restore: Callable[[tf.Tensor], tf.Variable]) -> None:
        """Become an ordinary variable when it is used next.

        Args:
            restore: makes the ordinary variable, given the whole. Whatever is
                done with this one is done with that one then.
        """
        self._restore = restore

    @property
    def is_in_shards(self) -> bool:
        """Whether ranks need one another to read it."""
        return self.is_remote and self._restored is None and not self.is_lost

    def become_ordinary(self) -> tf.Variable | None:
        """Return the ordinary variable that it is after the block; None: in it.

        Collective, if it is the first use.
        """
        keeps_shards = thread_state.keeping_shards.get() and self.is_in_shards
        if keeps_shards and (
            tf.executing_eagerly() or thread_state.exporting.get()
        ):
            return None
        if self._restored is None and self._restore is not None:
            # On all ranks: none has its part then.
            with tf.init_scope(), thread_state.keeping_shards.holding(False):
                self.settle(self._whole())
        return self._restored

    def settle(self, whole: tf.Tensor) -> None:
        """Become the ordinary variable, if the block has ended."""
        if self._restored is None and self._restore is not None:
            self._restored = self._restore(whole)
            self.free()

    def free(self) -> None:
        """Free the shards, which functions no longer in use still refer to."""
        # A graph keeps the shape of what is assigned.
        shards = itertools.chain(*self.shards) if tf.executing_eagerly() else ()
        for shard in shards:
            with tf.device(shard.device):
                tf.raw_ops.AssignVariableOp(
                    resource=shard.handle, value=tf.zeros([0], self.dtype)
                )

    @contextlib.contextmanager
    def holding_whole(self, reads: bool = True) -> Iterator[None]:
        """Hold the whole value in this block, for uses of the handle.

        Args:
            reads: whether it is read, in this thread; or only written.
        """
        with self._filling, tf.device(compat.HOST):
            if reads and not self._has_whole:
                self._overwrite(self._whole())
                self._has_whole = True
            self._uses += 1
        try:
            yield
        finally:
            with self._filling:
                self._uses -= 1
                if not self._uses and not self.is_lost:
                    self._has_whole = False
                    with tf.device(compat.HOST):
                        self._overwrite(tf.zeros([0], self.dtype))

    def _whole(self) -> tf.Tensor:
        """Put the whole value together on the host.

        Collective, if other ranks have shards.
        """
        if self.access is not None and self.is_remote:
            return self.access.read(self)
        first, *others = rows = self._rows()
        divided = self.layout.rows
        return tf.concat(rows, divided.axis) if divided and others else first

    @contextlib.contextmanager
    def as_whole(self, writes: bool, reads: bool = True) -> Iterator[None]:
        """Give the handle the whole value in a block; then divide it again.

        Args:
            writes: whether the block writes it.
            reads: whether it reads it.
        """
        eager = tf.executing_eagerly()
        is_here = self._has_whole or not self.is_remote
        in_step = thread_state.current_step() is not None and not eager
        # Keras asks for shapes in a graph that never runs.
        graph = compat.get_default_graph()
        is_used = in_step or compat.in_symbolic_scope()
        if is_used or graph in self._used_in or (is_here and _is_saved()):
            yield
            return
        wholes = thread_state.exporting.get()
        if wholes is not None and not eager and not self.is_lost:
            # The graph is saved with what its handle has.
            with tf.init_scope():
                wholes.enter_context(self.holding_whole())
            yield
            return
        if self.is_lost and not self._has_whole and reads:
            raise NoValueError(
                f"variable {self.path or self.name!r} has no value: each rank "
                "had its part of it when training ended with an error. Load "
                "the model from a checkpoint."
            )
        if not (eager or is_here):
            raise NoValueError(
                f"variable {self.path or self.name!r} cannot be used in a "
                "tf.function of your own: each rank has its part of it. Read "
                "or write it outside of the function."
            )
        with contextlib.ExitStack() as stack:
            # A device may be too small for the whole.
            stack.enter_context(tf.device(compat.HOST))
            if eager:
                has_value = reads and not self.is_lost
                stack.enter_context(self.holding_whole(has_value))
            else:
                self._used_in.append(graph)
                stack.callback(self._used_in.remove, graph)
                # A write fails as well, once the shards are gone.
                if not (self._has_whole or self.is_lost):
                    self._overwrite(self._whole())
            yield
            if writes:
                self._has_whole = self._has_whole or eager
                self._write(self._read_variable_op())
        if writes and eager:
            _freed.append(self.dtype.size * self.shape.num_elements())
            if sum(_freed) >= _LARGEST_KEPT:
                _freed.clear()
                return_freed_memory()

    def _write(self, whole: tf.Tensor) -> None:
        if self.access is not None and self.is_remote and not self.is_lost:
            self.access.write(self, whole)
        else:
            self.divide(whole)

    def _overwrite(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)


def spans_ranks(variable: Any) -> bool:
    """Whether a Keras variable is in shards over the ranks."""
    value = getattr(variable, "_value", variable)
    return isinstance(value, ShardedVariable) and value.is_remote


def current_value(variable: Variable) -> Any:
    """Return a variable's value; after its block, as an ordinary variable.

    Collective, if it is the first use since then.
    """
    value = getattr(variable, "_value", variable)
    if isinstance(value, ShardedVariable):
        ordinary = value.become_ordinary()
        return value if ordinary is None else ordinary
    return value


def _read(shard: tf.Variable) -> tf.Tensor:
    """Read a shard; a function that outlives it gets an error, not nothing."""
    name = "in_shards_only_until_the_end_of_the_block"
    return tf.ensure_shape(shard.read_value(), shard.shape, name=name)


def _is_saved() -> bool:
    """Whether a graph is traced for a file, with ordinary variables.

    There, a handle stands for the whole value; in a step, the layout divides
    it.
    """
    in_file = thread_state.exporting.get() or compat.is_saving()
    return bool(in_file) and not tf.executing_eagerly()


def _method(name: str, writes: bool) -> Callable[..., Any]:
    """Return a method of plain variables, for variables in shards."""
    original = getattr(compat.BaseResourceVariable, name)

    @functools.wraps(original)
    def method(variable: ShardedVariable, *args: Any, **kwargs: Any) -> Any:
        ordinary = variable.become_ordinary()
        if ordinary is not None:
            return getattr(ordinary, name)(*args, **kwargs)
        with variable.as_whole(writes, reads=name != "assign"):
            result = original(variable, *args, **kwargs)
        # A later read of the handle would find nothing.
        is_same = getattr(result, "handle", None) is variable.handle
        return variable if is_same else result

    return method


def _names_of_methods() -> Iterator[tuple[str, bool]]:
    """Yield the methods that use the handle, and whether each writes."""
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
