"""Hosts that are cut off, hang or are slow, while their ranks train."""

import time

import pytest

from keras_towers.foundation import settings
from tests.cluster.jobs import (
    NEEDS_HOSTS,
    NOTICED_S,
    STEPS,
    is_empty,
    launched,
    met,
    tasks,
)
from tests.cluster.lab import Lab
from tests.kit.scripts import write_executable

pytestmark = NEEDS_HOSTS
AGAIN = 75
HOROVOD = "HorovodStrategy"
SERVED = ("ps", "worker", "worker")
ELASTIC = ("--min-np 1 -np 2", "elastic")
OTHER_KERAS = "host3=has-another-keras"


def trained(jobs, strategy=HOROVOD):
    for job in jobs:
        job.says(STEPS, 3)
    return jobs


@pytest.mark.parametrize(
    ("event", "number"), [("cut", 0), ("cut", 1), ("hang", 1)]
)
def test_ranks_that_met_by_themselves(event, number):
    with Lab(2) as lab:
        jobs = trained(met(lab, HOROVOD))
        getattr(lab.hosts[number], event)()
        left = [n for n in (0, 1) if event == "cut" or n != number]
        for rank in left:
            assert jobs[rank].finish().code == AGAIN
            other = f"rank {1 - rank} on host{2 - rank} is lost"
            assert other in jobs[rank].lines[-1]


def test_a_rank_that_dies_while_the_others_connect():
    with Lab(2) as lab:
        jobs = met(lab, HOROVOD, "host2=dies-at-the-start")
        assert jobs[1].finish().code == 3
        assert jobs[0].finish().code == AGAIN
        said = "in the start of the job: rank 1 on host2 has ended."
        assert said in jobs[0].lines[-1]


@pytest.mark.parametrize("event", ["holds-the-lock", "is-in-a-callback"])
def test_what_is_slow_is_not_lost(event):
    with Lab(2) as lab:
        # Beside rank 0 the job's store is served.
        jobs = met(lab, HOROVOD, f"host1={event}")
        jobs[0].says("was slow")
        trained(jobs)


@pytest.mark.parametrize(
    ("strategy", "roles"),
    [
        (HOROVOD, None),
        ("DistributedParameterServerStrategy", SERVED),
        ("MultiWorkerTowerStrategy", ("worker", "worker")),
    ],
)
def test_links_that_heal_in_time(strategy, roles):
    """Within 15 s: TCP tries again after at most as long as the cut lasted."""
    with Lab(len(roles or "ab")) as lab:
        jobs = tasks(lab, roles, strategy) if roles else met(lab, strategy)
        workers = trained(jobs[-2:])
        lab.hosts[1].cut()
        time.sleep(15)
        lab.hosts[1].heal()
        trained(workers)


@pytest.mark.parametrize("number", [0, 1])
def test_workers_on_tensorflows_runtime(number):
    with Lab(2) as lab:
        roles = ("worker", "worker")
        jobs = trained(tasks(lab, roles, "MultiWorkerTowerStrategy"))
        lab.hosts[number].cut()
        begun = time.monotonic()
        for rank, job in enumerate(jobs):
            assert job.finish().code == 1
            lost = f"rank {1 - rank} (host{2 - rank}:4000) does not answer"
            assert lost in job.output
        assert time.monotonic() - begun < NOTICED_S


@pytest.mark.parametrize(
    ("strategy", "event", "number"),
    [
        ("SyncReplicasStrategy", "cut", 0),
        ("SyncReplicasStrategy", "hang", 1),
        ("DistributedParameterServerStrategy", "hang", 0),
        ("DistributedParameterServerStrategy", "cut", 1),
    ],
)
def test_parameter_servers_without_a_server_or_the_chief(
    strategy, event, number
):
    with Lab(3) as lab:
        jobs = tasks(lab, SERVED, strategy)
        trained(jobs[1:])
        getattr(lab.hosts[number], event)()
        begun = time.monotonic()
        for n, job in enumerate(jobs):
            if n != number or event == "cut":
                assert job.finish().code, job.output
        assert time.monotonic() - begun < NOTICED_S
        assert f"host{number + 1}:4000" in jobs[2].lines[-1], jobs[2].output


@pytest.mark.parametrize(
    ("strategy", "event"),
    [
        ("SyncReplicasStrategy", "cut"),
        ("DistributedReplicatedStrategy", "hang"),
        ("SyncReplicasStrategy:1", "cut"),
    ],
)
def test_parameter_servers_without_another_worker(strategy, event):
    """Those that cannot do without it end, with one to spare they go on."""
    lost = "worker 1 at host3:4000 is lost: it gives no sign of life"
    with Lab(3) as lab:
        server, chief, other = tasks(lab, SERVED, strategy)
        trained([chief, other])
        getattr(lab.hosts[2], event)()
        begun = time.monotonic()
        if strategy.endswith(":1"):
            chief.says(lost, 1, NOTICED_S)
            trained([chief])
        else:
            assert chief.finish().code == server.finish().code == 1
            assert f"worker 0 must end: {lost}" in chief.lines[-1]
            assert lost in server.lines[-1]
        if event == "cut":
            assert other.finish().code == AGAIN
        assert time.monotonic() - begun < NOTICED_S


@pytest.mark.parametrize(
    ("kind", "event"), [("fixed", "cut"), ("elastic", "hang")]
)
def test_nobody_is_left_without_the_launcher(kind, event):
    options = {"fixed": ("-np 2", HOROVOD), "elastic": ELASTIC}
    with Lab(3, ssh=True) as lab:
        trained([launched(lab, *options[kind])])
        getattr(lab.hosts[0], event)()
        begun = time.monotonic()
        assert all(map(is_empty, lab.hosts[1:]))
        assert time.monotonic() - begun < NOTICED_S


def test_ranks_that_no_longer_reach_one_another():
    """But the job's store, which is beside rank 0."""
    limits = settings.ENV_STALL_WARNING, settings.ENV_STALL_SHUTDOWN
    given = dict(zip(limits, ("5", "20"), strict=True))
    with Lab(3) as lab:
        jobs = trained(met(lab, HOROVOD, **given))
        lab.hosts[1].cut_from(lab.hosts[2])
        # The first one to end breaks its connections to the others.
        ended = [job.finish(NOTICED_S) for job in jobs]
        assert all(one.code for one in ended)
        said = "waits there, too. Ending the job."
        (named, *_) = [job for job in jobs if said in job.output]
        assert named.lines[-1].startswith("keras_towers: rank ")


def test_an_elastic_job_goes_on_without_the_host_of_rank_0():
    with Lab(4, ssh=True) as lab:
        job = launched(lab, "--min-np 2 -np 3", "elastic")
        job.says("[0] ", 3)
        lab.hosts[1].cut()
        job.says("each of 2 processes", 1, NOTICED_S)
        job.says(STEPS, 3)
        assert "lost the ssh connection to host2" in job.output


def test_an_elastic_job_without_enough_hosts_ends():
    with Lab(3, ssh=True) as lab:
        limits = "--min-np 2 -np 2 --elastic-timeout 30"
        job = launched(lab, limits, "elastic")
        job.says(STEPS, 3)
        lab.hosts[2].cut()
        # It is tried again and again, which is no progress.
        assert job.finish(NOTICED_S + 60).code == 1
        assert "found fewer than 2 slots in 30 s" in job.lines[-1]


def test_another_keras_is_refused():
    with Lab(3, ssh=True) as lab:
        job = launched(lab, "-np 2", HOROVOD, OTHER_KERAS)
        assert job.finish().code == 1
        assert "Keras 3.1.0" in job.output and "on host3" in job.output
        assert STEPS not in job.output


def test_a_worker_with_another_keras_does_not_join_an_elastic_job():
    with Lab(3, ssh=True) as lab:
        more = lab.shared / "more"
        more.touch()
        found = lab.shared / "hosts.sh"
        write_executable(found, f"echo host2; cat {more}")
        limits = f"--min-np 1 --max-np 2 --host-discovery-script {found}"
        job = launched(lab, limits, "elastic", OTHER_KERAS)
        job.says(STEPS, 3)
        more.write_text("host3")
        job.says("Keras 3.1.0", 1, NOTICED_S)
        job.says(STEPS, 3)
        assert "each of 2 processes" not in job.output
