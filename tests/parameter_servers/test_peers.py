"""Values that workers exchange through a server, which is this process."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_towers.errors import TowerError
from keras_towers.parameter_servers.connection import ServerPeers
from tests.kit.leaving import Boom


@pytest.fixture
def two(job):
    """A job of two workers."""
    return job(2)


def peers(job, rank, starts=1, timeout_s=60):
    connection = job.connect(rank, starts)
    return ServerPeers(connection, f"{connection.prefix}strategy", timeout_s)


def test_a_restarted_worker_gets_the_values_of_the_first_round(two):
    chief, worker = peers(two, 0), peers(two, 1)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(chief.gather_objects, "a")
        assert worker.gather_objects("b") == ["a", "b"]
        assert told.result(60) == ["a", "b"]
    assert peers(two, 1, starts=2).gather_objects("c") == ["a", "c"]


def test_equal_values_are_sent_once(two):
    everyone = peers(two, 0), peers(two, 1)
    with ThreadPoolExecutor(2) as pool:
        told = pool.map(lambda one: one.gather_objects(["a" * 99]), everyone)
        assert list(told) == [[["a" * 99]] * 2] * 2
    store, prefix = everyone[0].connection.store, everyone[0].prefix
    texts, numbers = store.get(f"{prefix}/gathered/1")
    assert (len(texts), numbers) == (1, [0, 0])


def test_an_error_of_polling_ends_the_wait(two):
    def look():
        raise Boom("the chief has failed")

    worker = peers(two, 1)
    with pytest.raises(Boom), worker.polling(look):
        worker.gather_objects("b")


def test_a_wait_that_is_too_long_names_the_missing_task(two):
    with pytest.raises(TowerError, match="worker 1 has waited 0.5 s for work"):
        peers(two, 1, timeout_s=0.5).gather_objects("b")


def test_a_restarted_chief_is_refused_once_values_were_gathered(two):
    peers(two, 1, timeout_s=0.2)
    with pytest.raises(TowerError, match="has waited"):
        peers(two, 0, starts=2, timeout_s=0.2).gather_objects("a")
    with pytest.raises(TowerError, match="was restarted alone after"):
        peers(two, 0, starts=3).gather_objects("a")
