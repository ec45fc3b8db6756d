"""The store of a job with many simulated ranks; the speed is not asserted."""

import json

import pytest

from tests.kit.scripts import run_python

SIZES = [12, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.slow])]


@pytest.mark.parametrize("size", SIZES)
def test_the_store_serves_simulated_ranks(tmp_path, size):
    path = tmp_path / "found.json"
    command = ["benchmarks.many_ranks", str(size), "--seconds", "3"]
    options = [f"--json={path}", *([] if size > 100 else ["--no-silent"])]
    done = run_python("-m", *command, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())[str(size)]
    silent = found.pop("a rank is silent until all know, s")
    assert (silent is None) == (size < 100)
    # All phases have come to their end.
    assert None not in found.values()
    # Many, on a machine that does much else, may take longer than ranks wait.
    assert not found["requests that failed"] or size > 100
    # In one each rank listens; others are of those that report or beat now.
    files = found["files that the store has open while ranks train"]
    assert size < files < 1.5 * size + 20
    assert f"| {size:,} |" in done.stdout
