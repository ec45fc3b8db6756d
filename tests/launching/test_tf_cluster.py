"""Clusters of TensorFlow's runtime on this machine."""

import socket

from keras_towers import tf_config
from keras_towers.launching.tf_cluster import (
    local_cluster,
    task_environment,
    tell_of_joining,
    told_of_joining,
)


def test_each_task_reads_the_same_cluster_and_its_own_place():
    with local_cluster({"ps": 1, "worker": 2}) as clusters:
        read = [
            tf_config.required(task_environment(cluster))
            for cluster in clusters
        ]
    assert read == clusters
    assert [(c.role, c.index) for c in read] == [
        ("ps", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert all(c.jobs == read[0].jobs and c.one_host for c in read)


def test_roles_without_a_task_are_left_out():
    with local_cluster({"ps": 0, "worker": 1}) as (worker,):
        assert "ps" not in worker.jobs


def test_ports_are_reserved_until_the_end_but_can_be_listened_on():
    with local_cluster({"worker": 1}) as (worker,):
        port = int(worker.address.rpartition(":")[2])
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", port))
                taken = False
            except OSError:
                taken = True
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen()
    assert taken


def test_launcher_hears_of_tasks_that_join():
    heard = []
    with told_of_joining(heard.append) as joins:
        variables = {n: joins(n) for n in (0, 12)}
        for number in (12, 0):
            tell_of_joining(variables[number])
    assert heard == [12, 0]
    # It has gone, or there was none.
    tell_of_joining(variables[0])
    tell_of_joining({})
