"""Which rank is to blame for the failure of a job."""

import queue
from types import SimpleNamespace

import pytest

from keras_towers.launching.elastic_job import ElasticDriver, ElasticOptions
from keras_towers.launching.supervision import (
    Connected,
    Outcome,
    Supervisor,
    describe,
    find_culprit,
    lost_among,
)
from keras_towers.rendezvous.hosts import place_ranks

pytestmark = pytest.mark.core

SHUT_DOWN = "UnknownError: Horovod has been shut down. This was caused by"
LOST = "Gloo: Read error [127.0.0.1]: Connection reset by peer"


def ended(code, text="", name="0"):
    return SimpleNamespace(code=code, tail=lambda: text, name=name, host=None)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0,), (0,)], None),
        ([(0,), (3,)], (1, True)),
        ([(1, "ValueError"), (1, SHUT_DOWN)], (0, True)),
        # The rank that raised is the last one to be gone.
        ([(1, SHUT_DOWN), (1, "ValueError")], (1, True)),
        ([(1, LOST), (137,)], (1, True)),
        ([(1, LOST), (134, LOST), (9,)], (2, True)),
        ([(1, SHUT_DOWN), (0,)], (0, False)),
    ],
)
def test_the_rank_that_failed_first_by_itself(ends, expected):
    ranks = [ended(*end) for end in ends]
    found = find_culprit(ranks)
    assert (found and (ranks.index(found[0]), found[1])) == expected


@pytest.mark.parametrize(
    ("end", "host", "is_lost"),
    [
        ((0,), None, False),
        ((1, "ValueError"), None, False),
        ((75,), None, True),
        ((137,), None, True),
        # The other's loss ended it.
        ((134, LOST), None, False),
        ((255,), "b", True),
        ((255,), None, False),
    ],
)
def test_a_new_start_helps_against_losses_only(end, host, is_lost):
    rank = ended(*end)
    rank.host = host
    assert lost_among([rank]) == ((rank,) if is_lost else ())


def test_ranks_that_wait_for_one_that_has_ended_are_told():
    """Not every engine does."""
    ranks = [
        SimpleNamespace(code=0, serves=False, index=n, name=str(n))
        for n in range(2)
    ]
    run = SimpleNamespace(
        events=queue.SimpleQueue(),
        console=SimpleNamespace(say=lambda text: None),
        server=SimpleNamespace(gone={}),
        processes=ranks,
        stand_by=lambda: None,
        job=SimpleNamespace(no_strategy=True),
    )
    for event in (Connected(0), Connected(1), *ranks):
        run.events.put(event)
    assert Supervisor(run).wait(how_to_connect="") == Outcome()
    assert run.server.gone[1] == ("rank 1", "has ended")


@pytest.mark.parametrize(
    ("code", "host", "shown", "said"),
    [
        # Others are in jobs.
        (137, None, True, "rank 1 was killed by SIGKILL (out of memory?)"),
        (139, None, True, "rank 1 was killed by SIGSEGV"),
        (200, None, False, "rank 1 ended with exit code 200"),
        (255, "b", True, "rank 1: lost the ssh connection to b"),
        (255, None, False, "rank 1 ended with exit code 255"),
    ],
)
def test_ends_are_described(code, host, shown, said):
    assert describe("rank 1", code, host, shown).startswith(said)


@pytest.mark.parametrize(
    ("codes", "least", "code"),
    [
        ((0, 0, 0), 1, 0),
        # Rank 0 has done all that is left to do, and enough are there.
        ((0, 137, 134), 1, 0),
        ((0, 137, 134), 2, 137),
        # Files that it writes after the training may be missing.
        ((137, 0, 0), 1, 137),
        # No loss of a worker: its script has failed.
        ((0, 1, 137), 1, 1),
        ((137, 137, 134), 1, 137),
    ],
)
def test_workers_that_are_lost_after_elastic_training(codes, least, code):
    said, hosts = [], dict.fromkeys("012", 1)
    run = SimpleNamespace(
        environment=lambda elastic: {},
        events=queue.SimpleQueue(),
        console=SimpleNamespace(say=said.append),
        server=SimpleNamespace(begin=lambda plan: None),
        processes=[],
    )
    driver = ElasticDriver(run, ElasticOptions(3, least, None, hosts), hosts)
    driver.rounds.begin_round(place_ranks([*hosts]))
    for host, end in zip("012", codes, strict=True):
        driver.workers[f"{host}:0"] = ended(end, name=host)
        driver.rounds.record_end(f"{host}:0")
    assert driver.end_and_report() == code
    assert len(said) == (code != 0)
