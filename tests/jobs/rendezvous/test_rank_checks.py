"""Ranks compare versions and scripts before they train."""

import hashlib
import logging
import sys

import pytest

from keras_towers import TowerError
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.hosts import place_ranks

MINE = {
    "TensorFlow": "2.21.0",
    "Keras": "3.15.1",
    "keras_towers": "0.1.0",
    "Python": "3.11",
    "Horovod": "0.28.1",
    "script": "train.py (0123)",
}
REFUSED, WARNED = True, False


@pytest.mark.parametrize(
    ("its", "refused", "said"),
    [
        ({"Keras": "3.14.1"}, REFUSED, "Keras 3.15.1, but b has Keras 3.14.1"),
        ({"keras_towers": "0.1.1"}, REFUSED, "keras_towers 0.1.1"),
        ({"Horovod": None}, REFUSED, "but b has no Horovod, which cannot"),
        ({"Keras": "4", "TensorFlow": "3"}, REFUSED, "TensorFlow 3 and Keras"),
        ({"Keras": "3.15.2"}, WARNED, "but b has Keras 3.15.2: results may"),
        ({"script": "train.py (4567)"}, WARNED, "train.py (4567): results may"),
        ({}, WARNED, None),
    ],
)
def test_what_may_differ_between_ranks(caplog, its, refused, said):
    its = {k: v for k, v in {**MINE, **its}.items() if v is not None}
    if refused:
        with pytest.raises(TowerError, match=said):
            rank_checks.compare_facts("a", MINE, "b", its)
        return
    with caplog.at_level(logging.WARNING, "keras_towers"):
        rank_checks.compare_facts("a", MINE, "b", its, warns=False)
        assert not caplog.messages
        rank_checks.compare_facts("a", MINE, "b", its)
    assert len(caplog.messages) == (said is not None)
    assert said is None or said in caplog.text


def test_a_rank_is_compared_with_the_first_that_arrived(job_store, monkeypatch):
    """In later rounds of an elastic job too."""
    joined = []

    def join(rank, **other):
        monkeypatch.setenv("HOROVOD_RANK", str(rank))
        monkeypatch.setenv("HOROVOD_HOSTNAME", f"h{rank}")
        facts = {**MINE, **other}
        monkeypatch.setattr(rank_checks, "process_facts", lambda engine: facts)
        rank_checks.compare_with_first_rank("Horovod")
        joined.append(rank)

    job_store.begin_round(place_ranks(["h0", "h1"]))
    join(0)
    join(1, Keras="3.15.2")
    job_store.begin_round(place_ranks(["h0", "h1", "h2", "h3"]))
    said = "rank 3 on h3 has Keras 2.1, but rank 0 on h0 has Keras 3.15.1"
    with pytest.raises(TowerError, match=said):
        join(3, Keras="2.1")
    join(2)
    assert joined == [0, 1, 2]


def test_facts_of_this_process(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("train()")
    monkeypatch.setattr(sys, "argv", [str(script), "--fast"])
    digest = hashlib.sha256(b"train()").hexdigest()[:8]
    found = rank_checks.process_facts.__wrapped__("Horovod")
    assert found.keys() == MINE.keys()
    assert found["Python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert found["script"] == f"train.py ({digest})"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert "script" not in rank_checks.process_facts.__wrapped__("Horovod")


def test_operations_that_differ_in_a_setting_are_shown_with_it():
    ranks = [("Conv2D", {"padding": p, "same": "1"}, "x.py:1") for p in "ab"]
    text = rank_checks.describe_lines(ranks)
    assert "rank 0: Conv2D (padding=a) of x.py:1; rank 1: Conv2D (pad" in text
    ranks = [("constant 3.5", {}, "x.py:1"), None]
    text = rank_checks.describe_lines(ranks)
    assert "rank 0: constant 3.5 of x.py:1; rank 1: none. " in text
    assert "set_random_seed" in text
