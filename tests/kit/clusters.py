"""Clusters of TensorFlow's tasks on this machine, for tests."""

import contextlib

from keras_towers.jobs.rendezvous.network import LOOPBACK, reserve_port
from keras_towers.jobs.rendezvous.tf_config import Cluster


@contextlib.contextmanager
def local_cluster(tasks):
    """Reserve a port for each task, by role: numbers of tasks.

    Inside the block TensorFlow's servers can listen on the ports, and no other
    process is given them.
    """
    with contextlib.ExitStack() as ports:
        jobs = {
            role: tuple(reserve_port(LOOPBACK, ports) for _ in range(count))
            for role, count in tasks.items()
            if count
        }
        yield [
            Cluster(jobs, role, index)
            for role, addresses in jobs.items()
            for index in range(len(addresses))
        ]
