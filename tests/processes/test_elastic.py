"""A worker is killed in the middle of an epoch, and another one comes."""

import itertools

import pytest

from tests.launch.jobs import Launched


@pytest.mark.slow
def test_training_goes_on_and_ends_as_if_nothing_had_happened(tmp_path):
    hosts = tmp_path / "hosts.sh"
    hosts.write_text(
        "#!/bin/sh\n" + "".join(f"echo 127.0.0.{n}:1\n" for n in (1, 2, 3))
    )
    hosts.chmod(0o755)
    done = Launched(
        tmp_path,
        ("--min-np", "2", "--max-np", "3")
        + ("--host-discovery-script", str(hosts))
        + ("--blacklist-cooldown-range", "3", "5")
        + ("-m", "tests.processes.survivors", str(tmp_path)),
    ).finish(200)
    assert done.code == 0, done.out + done.err
    # Those that stayed and the one that came all compare with one process.
    assert done.out.count("as undisturbed, after [0, 1, 2, 3, 4, 5]") == 3
    steps = [
        tuple(map(int, line.split()))
        for line in (tmp_path / "steps").read_text().splitlines()
    ]
    sizes = [size for size, _ in itertools.groupby(s for _, _, s in steps)]
    assert sizes == [3, 2, 3]
    killed = [size for _, _, size in steps].index(2)
    assert steps[killed - 1][:2] == (1, 13)
    # From the commit behind batch 12: eight of twenty are left. The new worker
    # may join in between, at the next commit.
    rest = [batch for epoch, batch, _ in steps[killed:] if epoch == 1]
    assert rest[0] == 0
    assert len(rest) == 8
