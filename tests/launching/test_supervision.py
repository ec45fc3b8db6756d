"""Whose fault it is that a job has failed."""

from types import SimpleNamespace

import pytest

from keras_towers.launching.supervision import blame, describe
from keras_towers.launching.workers import Workers

pytestmark = pytest.mark.core

SHUT_DOWN = "UnknownError: Horovod has been shut down. This was caused by"
LOST = "Gloo: Read error [127.0.0.1]: Connection reset by peer"


def ended(code, text="", name="0"):
    place = SimpleNamespace(name=name, host=None)
    return SimpleNamespace(code=code, tail=lambda: text, place=place)


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
def test_the_first_that_failed_by_itself(ends, expected):
    ranks = [ended(*end) for end in ends]
    found = blame(ranks)
    assert (found and (ranks.index(found[0]), found[1])) == expected


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
def test_what_is_said(code, host, shown, said):
    assert describe("rank 1", code, host, shown).startswith(said)


@pytest.mark.parametrize(
    ("codes", "least", "code"),
    [
        ((0, 0, 0), 1, 0),
        # Rank 0 has done all that is left to do, and enough are there.
        ((0, 137, 134), 1, 0),
        ((0, 137, 134), 2, 137),
        # What it writes behind the training may be missing.
        ((137, 0, 0), 1, 137),
        # No loss of a worker: its script has failed.
        ((0, 1, 137), 1, 1),
        ((137, 137, 134), 1, 137),
    ],
)
def test_who_is_lost_after_elastic_training(codes, least, code):
    said = []
    workers = Workers(None, SimpleNamespace(say=said.append), "")
    results = {}
    for number, end in enumerate(codes):
        workers._by_slot[f"{number}[0]"] = ended(end, name=str(number))
        results[f"{number}[0]"] = end, number
    found = SimpleNamespace(error_message=None, worker_results=results)
    assert workers.verdict(found, "0[0]", least) == code
    assert len(said) == (code != 0)
    found.error_message = "too few slots\nand more"
    assert workers.verdict(found, "0[0]", least) == 1
    assert said[-1] == "too few slots"
