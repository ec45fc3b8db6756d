"""Clusters of TensorFlow's runtime on this machine, a process for each task."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping

from keras_towers.meeting.addresses import LOOPBACK
from keras_towers.meeting.environments import tf_config
from keras_towers.meeting.environments.tf_config import Cluster

_JOINED = "KERAS_TOWERS_JOINED"


@contextlib.contextmanager
def local_cluster(tasks: Mapping[str, int]) -> Iterator[list[Cluster]]:
    """Give the tasks of a cluster free ports of this machine.

    The ports are reserved inside the block: TensorFlow's servers can listen on
    them, also after a restart, and nobody else is given them.

    Args:
        tasks: the number of tasks of each role.

    Yields:
        The cluster as each task sees it: role by role in the order of
        ``tasks``, and by index.

    Example:
        >>> with local_cluster({"ps": 1, "worker": 2}) as clusters:
        ...     [str(cluster) for cluster in clusters]
        ['ps 0 at 127.0.0.1:39701', 'worker 0 at 127.0.0.1:43127', ...]
    """
    with contextlib.ExitStack() as held:
        jobs = {
            role: tuple(
                f"{LOOPBACK}:{held.enter_context(_reserved())}"
                for _ in range(count)
            )
            for role, count in tasks.items()
            if count
        }
        yield [
            Cluster(jobs, role, index)
            for role, addresses in jobs.items()
            for index in range(len(addresses))
        ]


def task_environment(cluster: Cluster) -> dict[str, str]:
    """Variables that tell a process its task."""
    return {tf_config.VARIABLE: tf_config.written(cluster)}


@contextlib.contextmanager
def told_of_joining(
    told: Callable[[int], None],
) -> Iterator[Callable[[int], dict[str, str]]]:
    """Hear of each task that joins the others.

    Args:
        told: called from another thread with the number of the task.

    Yields:
        What gives variables to a task, by the number that it is to have.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "joined")
        os.mkfifo(path)
        # To write, too: it does not end when a task has closed it.
        with open(os.open(path, os.O_RDWR), "r+b", buffering=0) as pipe:

            def listen() -> None:
                while (line := pipe.readline()) != b"\n":
                    told(int(line))

            thread = threading.Thread(target=listen, daemon=True)
            thread.start()
            try:
                yield lambda number: {_JOINED: f"{number}:{path}"}
            finally:
                pipe.write(b"\n")
                thread.join()


def tell_of_joining(environment: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher, if there is one, that this task joins the others."""
    number, _, path = environment.get(_JOINED, "").partition(":")
    if not path:
        return
    # The launcher may have died.
    with contextlib.suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, f"{number}\n".encode())
        os.close(pipe)


@contextlib.contextmanager
def _reserved() -> Iterator[int]:
    with socket.socket() as holder:
        # TensorFlow sets the same option: with it on both sides, one may
        # listen where the other only holds the port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]
