"""A test that ends its process is one failure, and all others still run."""

from tests.kit.scripts import ROOT, python

CONFTEST = """
import pathlib, pytest
from tests.kit.schedule import Scheduler

def pytest_xdist_make_scheduler(config, log):
    return Scheduler(config, log)

@pytest.fixture
def record(request, worker_id):
    path = pathlib.Path(__file__).with_name("ran.txt")
    with path.open("a") as file:
        print(worker_id, request.path.stem, file=file)
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
    pass

def test_of_the_same_job(record):
    pass
"""


def run(folder):
    (folder / "conftest.py").write_text(CONFTEST)
    done = python(
        *("-m", "pytest", "-n", "2", "--dist", "loadfile"),
        *("-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)),
        PYTHONPATH=str(ROOT),
        PYTEST_ADDOPTS="",
    )
    return done.stdout + done.stderr


def test_a_crash_costs_one_test(tmp_path):
    # The first, a middle and the last one leave different tests to run.
    for crashes in (0, 1, 3, None):
        file = tmp_path / f"test_{crashes}.py"
        file.write_text(TESTS.format(crashes=crashes))
    said = run(tmp_path)
    assert "3 failed, 17 passed" in said, said
    for crashes in (0, 1, 3):
        assert f"test_{crashes}.py::test_one_of_four[{crashes}]" in said


def test_jobs_are_run_once(tmp_path):
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(OF_A_JOB)
    said = run(tmp_path)
    assert "8 passed" in said, said
    ran = (tmp_path / "ran.txt").read_text().splitlines()
    assert len(set(ran)) == 4
