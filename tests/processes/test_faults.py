"""A rank that leaves, raises, is killed or stands still, within ``fit``.

Ranks are killed in ``test_elastic.py`` and ``jobs/launching``, too, workers of
parameter servers in ``test_lost_tasks.py``.
"""

import psutil
import pytest

from keras_towers.foundation.errors import FAILED_ON
from keras_towers.jobs.agent import FROZEN
from tests.kit.processes import Launched, all_gone
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.slow
HOROVOD = "HorovodStrategy"
# The second is more than a busy machine needs to trace a step.
STALL = ("--stall-warning", "5", "--stall-shutdown", "20")


def run(folder, fault, how, number, *options):
    """Run a job, of which no process may be left."""
    script = "-m", "tests.processes.faults", fault, how
    done = Launched(folder, number, 2, *options, *script).finish()
    left = []
    for process in (folder / "processes").read_text().split():
        try:
            left.append(psutil.Process(int(process)))
        except psutil.NoSuchProcess:
            continue
    assert all_gone(left)
    assert "trained to the end" not in done.out
    return done


@pytest.mark.alternate(turn=2)
@pytest.mark.parametrize(
    "fault, how, reason",
    sample_of(
        [
            ("SIGSTOP", HOROVOD, "rank 1 has "),
            ("late", HOROVOD, "the start of the job: rank 1 has given no sign"),
            ("sleep", HOROVOD, "rank 1 was last seen after step 2 of fit"),
            (
                "sleep",
                "dropin",
                "in update 4: rank 1 was last seen in update 3",
            ),
        ],
        4,
    ),
)
def test_a_rank_that_stands_still_is_named(tmp_path, fault, how, reason):
    done = run(tmp_path, fault, how, "-np", *STALL)
    assert done.code == 75, done.err
    assert done.err.count(reason) >= 2  # A warning, and the end.
    assert "Ending the job" in done.err


@pytest.mark.long
def test_a_rank_that_is_frozen_is_lost(tmp_path):
    done = run(tmp_path, "SIGSTOP", "BytePSStrategy", "-np", "--servers", 1)
    assert done.code == FROZEN, done.err
    assert "rank 1 is lost: it was stopped (SIGSTOP) for 30 s" in done.err


@pytest.mark.alternate(turn=1)
@pytest.mark.parametrize(
    "how, number",
    sample_of([(HOROVOD, "-np"), ("MultiWorkerTowerStrategy", "--workers")]),
)
def test_a_rank_that_is_killed_is_named_on_the_others(tmp_path, how, number):
    done = run(tmp_path, "SIGKILL", how, number)
    assert done.code == 137, done.err
    named = [line for line in done.err.splitlines() if FAILED_ON in line]
    assert len(named) == 1 and named[0].startswith("[0]"), done.err
    assert f"{FAILED_ON} rank 1, which has ended" in named[0]
    for words in ("make the same call on one device", ".cc:"):
        assert words not in done.err, done.err


@pytest.mark.long
def test_a_rank_that_leaves_is_named_where_the_engine_says_nothing(tmp_path):
    done = run(tmp_path, "end", "BytePSStrategy", "-np", "--servers", "1")
    assert done.code == 75, done.err
    assert "rank 1 has ended. Ending the job" in done.err


@pytest.mark.alternate(turn=3)
def test_an_exchange_without_memory_outside_of_a_call_ends_the_job(tmp_path):
    done = run(tmp_path, "memory", HOROVOD, "-np")
    assert done.code == 1, done.err
    assert "rank 1 ended with exit code 1" in done.last, done.err


@pytest.mark.alternate(turn=0)
@pytest.mark.parametrize(
    "how, number, fault, code, words",
    sample_of(
        [
            (
                *("MultiWorkerTowerStrategy", "--workers", "error", 1),
                ["InvalidArgumentError: a label", "finite/CheckNumerics}}"],
            ),
            (HOROVOD, "-np", "exit", 3, ["SystemExit: 3"]),
        ]
    ),
)
def test_an_error_on_one_rank_is_named_on_the_others(
    tmp_path, how, number, fault, code, words
):
    done = run(tmp_path, fault, how, number)
    assert done.code == code, done.err
    named = [line for line in done.err.splitlines() if FAILED_ON in line]
    assert len(named) == 1 and named[0].startswith("[0]"), done.err
    text = "fit has ended on rank 0, because it failed on rank 1: "
    assert f"{text}{words[0]}" in named[0] and words[-1] in named[0]


@pytest.mark.alternate(turn=5)
def test_an_error_between_calls_is_named_on_the_others(tmp_path):
    """A folder that both make."""
    done = run(tmp_path, "folder", "MultiWorkerTowerStrategy", "--workers")
    assert done.code == 1, done.err
    named = [line for line in done.err.splitlines() if " fit" in line]
    said = "rank 1 (FileExistsError: [Errno 17] File exists: 'runs') has ended"
    assert any(line.startswith("[0]") and said in line for line in named)
