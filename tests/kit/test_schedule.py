"""A test that ends its process is one failure, and all others still run."""

import pytest

from tests.kit.scripts import python

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


@pytest.mark.long
def test_a_crash_costs_one_test(tmp_path):
    # The first, a middle and the last one leave different tests to run.
    for crashes in (0, 1, 3, None):
        file = tmp_path / f"test_{crashes}.py"
        file.write_text(TESTS.format(crashes=crashes))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = ["-m", "pytest", "-n", "2", "--dist", "loadfile"]
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = python(*command, *options, str(tmp_path), PYTEST_ADDOPTS="")
    assert "3 failed, 17 passed" in done.stdout, done.stdout + done.stderr
    for crashes in (0, 1, 3):
        assert f"test_{crashes}.py::test_one_of_four[{crashes}]" in done.stdout
