"""How an elastic job has ended, given how its workers have."""

from types import SimpleNamespace

import pytest

from keras_towers.launching.workers import Workers

pytestmark = pytest.mark.core


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
def test_who_is_lost_after_the_training(codes, least, code):
    said = []
    workers = Workers(None, SimpleNamespace(say=said.append), "")
    results = {}
    for number, ended in enumerate(codes):
        workers._by_slot[f"{number}[0]"] = SimpleNamespace(
            code=ended,
            tail=lambda: "",
            place=SimpleNamespace(name=str(number), host=None),
        )
        results[f"{number}[0]"] = ended, number
    found = SimpleNamespace(error_message=None, worker_results=results)
    assert workers.verdict(found, "0[0]", least) == code
    assert len(said) == (code != 0)
