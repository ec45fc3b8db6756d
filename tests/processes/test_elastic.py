"""Workers that are killed or fail while others train, and new ones."""

import importlib.util
import itertools

import pytest

from tests.kit.processes import Launched
from tests.kit.sampling import sample_of
from tests.kit.scripts import write_executable

pytestmark = pytest.mark.slow


def steps(folder):
    """The epoch, the batch and the number of ranks of each batch."""
    lines = (folder / "steps").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


# By the engine: how the first ranks are counted, and what else is started.
ENGINES = {
    "horovod": ("-np", "3"),
    "multi-worker": ("--workers", "3"),
    "byteps": ("-np", "3", "--servers", "1"),
}


def need(strategy):
    if strategy == "byteps" and not importlib.util.find_spec("byteps"):
        pytest.skip("BytePS is not installed: make .venv/byteps-cpu")


@pytest.mark.alternate(turn=3)
@pytest.mark.parametrize(
    ("strategy", "options", "devices"),
    sample_of(
        [
            ("horovod", (), ()),
            ("multi-worker", ("--standby",), ("mesh",)),
            ("byteps", (), ()),
        ],
        part=3,
    ),
)
def test_training_goes_on_and_ends_as_if_nothing_had_happened(
    tmp_path, strategy, options, devices
):
    need(strategy)
    slots = tmp_path / "slots"
    slots.write_text("localhost:3\n")
    hosts = write_executable(tmp_path / "hosts.sh", f"cat {slots}")
    (tmp_path / "victim").touch()
    options = (
        *ENGINES[strategy],
        *("--min-np", "2", "--max-np", "3", *options),
        *("--host-discovery-script", str(hosts)),
    )
    worker = "-m", "tests.processes.enduring", str(tmp_path), strategy
    job = Launched(tmp_path, *options, *worker, "elastic", *devices)
    # Its host goes with the rank that is killed, and comes again.
    job.wait_for("leaves", tmp_path / "killed", limit_s=120)
    slots.write_text("localhost:2\n")
    job.wait_for(" 2\n", tmp_path / "steps", limit_s=120)
    slots.write_text("localhost:3\n")
    done = job.finish(220)
    assert done.code == 0, done.out + done.err
    assert done.out.count("as undisturbed") == 3
    done_steps = steps(tmp_path)
    sizes = [s for s, _ in itertools.groupby(s for _, _, s in done_steps)]
    # The launcher may have seen the slots change after the kill.
    assert sizes in ([3, 2, 3], [3, 2, 3, 2, 3])
    assert "hosts have come or gone" in done.err
    # From the commit behind batch 12: eight of twenty are left.
    begins = [n for n, step in enumerate(done_steps) if step[:2] == (1, 0)]
    rest = [batch for epoch, batch, _ in done_steps[begins[1] :] if epoch == 1]
    assert len(rest) == 8


@pytest.mark.alternate(turn=4)
@pytest.mark.parametrize(
    ("strategy", "standby"),
    sample_of(
        [
            ("multi-worker", ()),
            ("byteps", ("--standby",)),
            ("horovod", ("--standby",)),
        ],
        part=3,
    ),
)
def test_a_job_that_is_started_again_ends_as_if_nothing_had_happened(
    tmp_path, strategy, standby
):
    need(strategy)
    (tmp_path / "victim").touch()
    count = "--workers" if strategy == "multi-worker" else "-np"
    options = (*(count, "2"), *("--restarts", "1"), *standby)
    servers = ("--servers", "1") if strategy == "byteps" else ()
    worker = "-m", "tests.processes.enduring", str(tmp_path), strategy
    devices = ("mesh",) if standby else ()
    done = Launched(tmp_path, *options, *servers, *worker, *devices).finish(220)
    assert done.code == 0, done.out + done.err
    assert done.out.count("as undisturbed") == 2
    assert "1 was killed by SIGKILL" in done.err
    batches = steps(tmp_path)
    # From the backup behind batch 12: eight of twenty are left.
    again = batches.index((1, 0, 2), batches.index((1, 0, 2)) + 1)
    assert batches[again - 1] in [(1, 12, 2), (1, 13, 2)]
    assert [b for e, b, _ in batches[again:] if e == 1] == [*range(8)]
