"""Which rank is to blame for the failure of a job."""

import queue
import signal
from types import SimpleNamespace

import pytest

from keras_towers.jobs import agent
from keras_towers.jobs.launching.outcome import (
    Connected,
    HostsChanged,
    Outcome,
    describe,
    find_culprit,
    lost_among,
)
from keras_towers.jobs.launching.rank_process import signal_name
from keras_towers.jobs.launching.supervision import Supervisor
from keras_towers.jobs.rendezvous import store

pytestmark = pytest.mark.core

SHUT_DOWN = "UnknownError: Horovod has been shut down. This was caused by"
LOST = "[/x/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]: reset"
# A rank that has ended its connections itself, after its error.
FIRST = f"MemoryError\nHorovod background loop uncaught exception: {LOST}"
OF_GRPC = "Additional GRPC error information from remote target /job:worker"
OWN = "ConnectionResetError: [Errno 104] Connection reset by peer"


def ended(code, text="", name="0"):
    return SimpleNamespace(
        code=code,
        tail=lambda: text,
        name=name,
        host=None,
        index=int(name),
        stopped=False,
        follows=False,
        killed=signal_name(code) is not None,
        send=lambda number: None,
    )


def supervised(ranks, events=(), elastic=False, told=None, errors=()):
    """Let ranks end after some events; return how the job has ended."""
    values = {store.RESUMES: told}
    for rank, error in enumerate(errors):
        values[f"{store.ERROR}{rank}"] = error
    said = []
    run = SimpleNamespace(
        events=queue.SimpleQueue(),
        console=SimpleNamespace(say=said.append),
        server=SimpleNamespace(gone={}, get=values.get),
        processes=ranks,
        stand_by=lambda: None,
        may_restart=True,
        job=SimpleNamespace(
            no_strategy=True, elastic=elastic, grace_s=30, runs="script"
        ),
    )
    for event in (*events, *ranks):
        run.events.put(event)
    return Supervisor(run).wait(how_to_connect=""), said, run


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0,), (0,)], None),
        ([(0,), (3,)], (1, True)),
        ([(1, "ValueError"), (1, SHUT_DOWN)], (0, True)),
        # The rank that raised is the last one to be gone.
        ([(1, SHUT_DOWN), (1, "ValueError")], (1, True)),
        ([(1, LOST), (137,)], (1, True)),
        ([(1, LOST), (1, FIRST)], (1, True)),
        ([(1, OF_GRPC), (1, OWN)], (1, True)),
        # The script's own connections are none between ranks.
        ([(1, OWN), (1, SHUT_DOWN)], (0, True)),
        ([(1, "BrokenPipeError: Broken pipe"), (0,)], (0, True)),
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
        ((agent.FROZEN,), None, True),
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
    ranks = [ended(0, name="0"), ended(0, name="1")]
    outcome, _, run = supervised(ranks, [Connected(0), Connected(1)])
    assert outcome == Outcome()
    assert run.server.gone[1] == ("rank 1", "has ended")


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_tells_of_the_failure_of_another_is_not_to_blame(first):
    """Whatever its output says, and whichever ends first."""
    ranks = [ended(1, "ValueError", name=str(n)) for n in (first, 1 - first)]
    errors = [("TowerError: fit has ended", True), ("ValueError", False)]
    outcome, said, _ = supervised(ranks, errors=errors)
    assert outcome.cause.index == 1
    assert said == ["rank 1 ended with exit code 1; its last lines are above"]


@pytest.mark.parametrize(
    ("code", "host", "shown", "said"),
    [
        # Others are in jobs.
        (137, None, True, "rank 1 was killed by SIGKILL (out of memory?)"),
        (139, None, True, "rank 1 was killed by SIGSEGV"),
        (agent.FROZEN, None, True, "rank 1 is lost: it was stopped (SIGSTOP)"),
        (200, None, False, "rank 1 ended with exit code 200"),
        (255, "b", True, "rank 1: lost the ssh connection to b"),
        (255, None, False, "rank 1 ended with exit code 255"),
    ],
)
def test_ends_are_described(code, host, shown, said):
    assert describe("rank 1", code, host, shown).startswith(said)


@pytest.mark.parametrize(
    ("codes", "elastic", "code", "lost"),
    [
        ((0, 0, 0), True, 0, 0),
        # Rank 0 has done all that is left to do.
        ((0, 137, 134), True, 0, 0),
        ((0, 137, 134), False, 137, 0),
        # Files that it writes after the training may be missing.
        ((137, 0, 0), True, 137, 1),
        # No loss of a rank: its script has failed.
        ((0, 1, 0), True, 1, 0),
        ((137, 137, 0), True, 137, 2),
    ],
)
def test_ranks_that_are_lost_after_training(codes, elastic, code, lost):
    ranks = [ended(end, name=str(n)) for n, end in enumerate(codes)]
    outcome, said, _ = supervised(ranks, elastic=elastic)
    assert (outcome.code, len(outcome.lost)) == (code, lost)
    assert len(said) == (set(codes) != {0})


@pytest.mark.parametrize(
    ("told", "codes", "code", "lost"),
    [
        # They have made a backup, or left as SIGTERM says.
        (True, (75, 75), 75, 2),
        (True, (75, 143), 75, 2),
        (True, (0, 0), 0, 0),
        # The training had ended: rank 0 may have deleted its backup.
        (True, (0, 143), 0, 0),
        (True, (1, 75), 1, 0),
        # Nobody told them: they cannot make a backup.
        (None, (0, 0), 0, 0),
    ],
)
def test_ranks_back_up_when_hosts_change(told, codes, code, lost):
    ranks = [ended(end, name=str(n)) for n, end in enumerate(codes)]
    signals = []
    for rank in ranks:
        rank.send = signals.append
    outcome, said, _ = supervised(
        ranks, [HostsChanged()], elastic=True, told=told
    )
    assert signals == (2 * [signal.SIGTERM] if told else [])
    assert outcome.code == code
    assert code == 1 or outcome.lost == tuple(ranks)[:lost]
    assert bool(told) == any("hosts have come or gone" in line for line in said)
