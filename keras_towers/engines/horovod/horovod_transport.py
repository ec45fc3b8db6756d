"""The transport of Horovod: one process per device.

Horovod matches tensors by name: an all-reduce starts as soon as all ranks have
submitted a tensor of the name, whatever else is running, and small tensors that
are ready at the same time are fused (Sergeev and Del Balso, "Horovod: fast and
easy distributed deep learning in TensorFlow", 2018). So names must be the same
on all ranks, and no name may be in flight twice.

TensorFlow does not know that Horovod's operations have effects. If a rank has
no rows of a batch, so that all it sends is constant, TensorFlow would run an
operation before the step, or merge two of them, and the other ranks would wait.
So what they send must be unknown to TensorFlow.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import psutil
import tensorflow as tf

from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.known_engines import HOROVOD
from keras_towers.jobs.rendezvous import (
    activity,
    launchers,
    meet,
    network,
    rank_checks,
    separate_training,
    store,
    watch,
)
from keras_towers.transport import messages
from keras_towers.transport.engine_transport import EngineTransport

_connected = False
# The arguments of init(), to call it again.
_arguments: tuple[tuple[object, ...], dict[str, object]] = (), {}
# The place of this process, which Horovod does not tell while it is shut down.
_place: dict[str, int] = {}


def connect(hvd: ModuleType, *args: object, **kwargs: object) -> None:
    """Call Horovod's ``init``, however this process was started."""
    global _connected, _arguments
    separate_training.refuse_child()
    member = launchers.detect()
    if not hvd.is_initialized():
        # Built with MPI, Horovod itself finds ranks that mpirun has started.
        if member and not (member.speaks_mpi and hvd.mpi_built()):
            meet.join_job()
        if not _connected:
            rank_checks.compare_with_first_rank("Horovod")
        # Without a rendezvous, Horovod's C++ code would wait and then abort.
        if not (hvd.mpi_built() or os.environ.get(store.HOROVODS_ADDRESS)):
            _refuse_alone()
        if (
            not hvd.mpi_built()
            or os.environ.get("HOROVOD_CONTROLLER") == "gloo"
        ):
            _check_name()
        with _watch_start():
            _init(hvd, *args, **kwargs)
        _arguments = args, kwargs
    _connected = True
    # A list of ranks may name only one.
    may_be_one = args or kwargs.get("comm")
    if hvd.size() == 1 and not (member and may_be_one):
        _refuse_alone()


# Both ends of the connections that Horovod has made.
_links: set[tuple[object, object]] = set()
# For each time that Horovod begins to shut down, what is set when it has.
_shutdowns: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()


def _init(hvd: ModuleType, *args: object, **kwargs: object) -> None:
    """Start Horovod, and note which connections it makes."""
    global _links
    before = {_both_ends(link) for link in _connections()}
    hvd.init(*args, **kwargs)
    _links = {_both_ends(link) for link in _connections()} - before
    if not hvd.mpi_enabled():
        _watch_shutdowns()
        # Before Horovod's own shutdown.
        atexit.unregister(_leave)
        atexit.register(_leave, hvd)


def _connections() -> list[Any]:
    return network.own_sockets(psutil.CONN_ESTABLISHED)


def _both_ends(connection: Any) -> tuple[object, object]:
    return connection.laddr, connection.raddr


def _leave(hvd: ModuleType) -> None:
    """Shut Horovod down, even if ranks wait in one of its operations."""
    ended = threading.Event()
    _shutdowns.put(ended)
    hvd.shutdown()
    ended.set()


@functools.cache
def _watch_shutdowns() -> None:
    """Start the thread that ends connections if a shutdown takes long.

    Ranks agree on a shutdown between two operations. One that fails on some
    ranks only, without memory for what it receives, never ends on the others:
    until their connections do. At the end of Python no thread can start.
    """

    def watch_each() -> None:
        while True:
            if not _shutdowns.get().wait(settings.CANCEL_S):
                _end_connections()

    name = "keras-towers-shutdown"
    threading.Thread(target=watch_each, name=name, daemon=True).start()


def _end_connections() -> None:
    with contextlib.ExitStack() as stack:
        links = (link for link in _connections() if _both_ends(link) in _links)
        for link in network.copies_of(links, stack):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def _check_name() -> None:
    """Raise an error if Horovod cannot use the name of this machine.

    Horovod exchanges through the address that the name resolves to, whatever
    interface it is told, and crashes if there is none.
    """
    name = socket.gethostname()
    address = network.address_of_name(name)
    others = launchers.whole_number_in(os.environ, "HOROVOD_CROSS_SIZE") or 1
    if address is None:
        what = "resolves to no address of this machine"
    elif others > 1 and ipaddress.ip_address(address).is_loopback:
        what = f"resolves to {address}, where other machines cannot reach it"
    else:
        return
    raise TowerError(
        f"the name of this machine, {name}, {what}, and Horovod connects "
        "ranks through the address of this name. Give the name the machine's "
        "real address in /etc/hosts, before any other line with it, such as: "
        f"10.0.0.1 {name}"
    )


@contextlib.contextmanager
def _watch_start() -> Iterator[None]:
    """Let the stall watch report waits for ranks that have not started."""
    rank = launchers.whole_number_in(os.environ, "HOROVOD_RANK")
    size = launchers.whole_number_in(os.environ, "HOROVOD_SIZE")
    if rank is None or size is None:
        yield
        return
    watch.start_watch(rank, size)
    try:
        activity.mark("the start of the job")
        yield
    finally:
        activity.mark("")


def _refuse_alone() -> None:
    """Raise an error if this process is one of several."""
    separate_training.refuse(
        "Horovod",
        "Horovod knows of no other",
        "Start the script with `keras-towers run`, and do not call Horovod's "
        "own init() before.",
    )


class HorovodTransport(EngineTransport):
    """Horovod as a ``keras_towers.transport.Transport``.

    Args:
        process_set: Horovod's set of the ranks to connect; None: all ranks.
    """

    name = "Horovod"

    def __init__(self, process_set: Any = None):
        super().__init__()
        self.engine = HOROVOD.import_module()
        connect(self.engine)
        if process_set is self.engine.global_process_set:
            process_set = None
        self._process_set = process_set
        self._is_of_all_ranks = process_set is None
        # Whether what is on a GPU is sent from the host.
        self._from_host = False
        if self._is_of_all_ranks:
            separate_training.take_place(self)
        watch.start_watch(int(self.engine.rank()), int(self.engine.size()))
        if store.store_of_job() is None:
            # Under MPI, and Horovod's own launcher.
            self.compare_once("Horovod")

    @property
    def rank(self) -> int:
        ranks = self._process_set
        return self._place_of("rank") if ranks is None else int(ranks.rank())

    @property
    def size(self) -> int:
        ranks = self._process_set
        return self._place_of("size") if ranks is None else int(ranks.size())

    @property
    def local_rank(self) -> int:
        return self._place_of("local_rank")

    @property
    def local_size(self) -> int:
        return self._place_of("local_size")

    def _place_of(self, name: str) -> int:
        if self.engine.is_initialized():
            _place[name] = int(getattr(self.engine, name)())
        return _place[name]

    @property
    def loses_exchanges(self) -> bool:
        # An operation that a thread adds to Horovod's queue while Horovod shuts
        # down may stay there. Over MPI, it does not shut down.
        return not self.engine.mpi_enabled()

    def leave(self) -> None:
        # All ranks shut down with this one, and their operations fail. Not so
        # after a shutdown of their own: then they would wait forever. MPI
        # cannot be started again.
        if self.engine.is_initialized() and not self.engine.mpi_enabled():
            _leave(self.engine)

    def reconnect(self) -> None:
        if not self.engine.is_initialized():
            args, kwargs = _arguments
            _init(self.engine, *args, **kwargs)

    def cause_of(self, error: Any) -> Exception:
        # Horovod converts TensorFlow's errors in its operations, which only
        # allocate memory, to this one.
        is_lost = isinstance(error, tf.errors.UnknownError)
        if is_lost and "Unknown error." in str(error.message):
            return tf.errors.ResourceExhaustedError(
                None,
                None,
                f"Horovod has no memory on rank {self.rank} for an operation",
            )
        return error

    def disconnect(self) -> None:
        """Leave the job."""
        watch.stop_watch()
        _leave(self.engine)

    @property
    def _options(self) -> dict[str, object]:
        """The arguments of all operations."""
        ranks = self._process_set or self.engine.global_process_set
        return {"process_set": ranks, "ignore_name_scope": True}

    def sum_on(self, gpu: str | None) -> None:
        self._from_host = gpu is None

    def try_nccl(self, gpu: str | None) -> None:
        # All ranks have the same build.
        if self.engine.nccl_built() and self.size > 1:
            super().try_nccl(gpu)

    @property
    def sums_float16(self) -> bool:
        # Gloo and MPI add float16 on the CPU, element by element. Ranks have to
        # agree, so this depends on their build, and not on their GPUs.
        return bool(self.engine.nccl_built()) and not self._from_host

    def _run(
        self,
        what: str,
        collective: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        *args: Any,
        **kwargs: Any,
    ) -> list[tf.Tensor]:
        def from_host(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            with tf.device(compat.HOST):
                return collective(tensors)

        send = from_host if self._from_host else collective
        return super()._run(what, send, *args, **kwargs)

    def _runs_eagerly(self, tensors: Sequence[tf.Tensor]) -> bool:
        # Several eager operations would run in sequence, each in a cycle of
        # Horovod's.
        return len(tensors) == 1

    def engine_sum(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        return [
            self.engine.mpi_ops._allreduce(
                tensor,
                name=f"{key}.{index}",
                op=self.engine.Sum,
                **self._options,
            )
            for index, tensor in enumerate(map(compat.unknown, tensors))
        ]

    def engine_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        options = self._options
        with _room_for(tensor, self.size):
            gather = self.engine.allgather
            return _send_bits(tensor, gather, name=key, **options)

    def engine_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        if self._from_host or not self.engine.nccl_built():
            return super().engine_scatter(tensor, counts, key)
        padded = messages.with_rows_each(messages.summable(tensor), counts)
        part = self.engine.mpi_ops._reducescatter(
            compat.unknown(padded),
            name=key,
            op=self.engine.Sum,
            **self._options,
        )
        return messages.summed(part[: counts[self.rank]], tensor.dtype)

    def engine_exchange(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        options = self._options
        with _room_for(tensor, 1):
            exchange = self.engine.alltoall
            return _send_bits(tensor, exchange, name=key, **options)

    def engine_broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        ranks = self._process_set
        return [
            _send_bits(
                tensor,
                self.engine.broadcast,
                root_rank=root if ranks is None else ranks.ranks[root],
                name=f"{key}.{index}",
                **self._options,
            )
            for index, tensor in enumerate(tensors)
        ]


_SENT_AS_THEY_ARE = (
    "bool int8 uint8 int16 uint16 int32 int64 float16 float32 float64"
)


def _room_for(
    tensor: tf.Tensor, copies: int
) -> contextlib.AbstractContextManager[None]:
    """Return a block whose operations need memory for copies of a tensor.

    Without it they fail before they begin. Horovod allocates what it gathers
    when all ranks have begun: if that fails on one of them, the others are left
    in the middle of an operation, and so is whatever this rank still exchanges.
    """
    shape = tf.concat([[copies], tf.shape(tensor)], 0)
    room = tf.raw_ops.Empty(shape=shape, dtype=tensor.dtype)
    return tf.control_dependencies([room])


def _send_bits(
    tensor: tf.Tensor, send: Callable[..., tf.Tensor], **options: object
) -> tf.Tensor:
    """Send a tensor, as bytes if Horovod lacks its dtype."""
    if tensor.dtype.name in _SENT_AS_THEY_ARE.split():
        return send(compat.unknown(tensor), **options)
    octets = send(compat.unknown(messages.bytes_of(tensor)), **options)
    return messages.tensor_of(octets, tensor.dtype)
