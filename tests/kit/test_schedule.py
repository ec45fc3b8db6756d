"""A test that ends its process is one failure, and all others still run."""

import os
import subprocess
import sys

from tests.launching.jobs import ROOT

CONFTEST = """
from tests.kit.schedule import Scheduler

def pytest_xdist_make_scheduler(config, log):
    return Scheduler(config, log)
"""
TESTS = """
import os, pytest

@pytest.mark.parametrize("number", range(4))
def test_one_of_four(number):
    if number == {crashes}:
        os._exit(1)

def test_other():
    pass
"""

OF_A_JOB = """
from tests.kit.ranks import Job

def test_of_a_job(record):
    record()

def test_of_the_same_job(record):
    record()

def test_of_it_too(record):
    record()
"""
RECORD = """
import pathlib, pytest

@pytest.fixture
def record(request, worker_id):
    path = pathlib.Path(__file__).with_name("ran.txt")
    def write():
        with path.open("a") as file:
            print(worker_id, request.path.stem, file=file)
    return write
"""


def run(folder, more=""):
    (folder / "conftest.py").write_text(CONFTEST + more)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", folder, folder],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_crash_costs_one_test(tmp_path):
    # The first, a middle and the last one leave different tests to run.
    for crashes in (0, 1, 3, None):
        file = tmp_path / f"test_{crashes}.py"
        file.write_text(TESTS.format(crashes=crashes))
    done = run(tmp_path)
    assert "3 failed, 17 passed" in done.stdout, done.stdout + done.stderr
    for crashes in (0, 1, 3):
        assert f"test_{crashes}.py::test_one_of_four[{crashes}]" in done.stdout


def test_jobs_are_run_once(tmp_path):
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(OF_A_JOB)
    done = run(tmp_path, RECORD)
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    ran = (tmp_path / "ran.txt").read_text().splitlines()
    assert len(set(ran)) == 4
