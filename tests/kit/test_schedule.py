"""A test that ends its process is one failure, and all others still run."""

from tests.kit.scripts import ROOT, python

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


def test_a_crash_costs_one_test(tmp_path):
    # The first, a middle and the last one leave different tests to run.
    for crashes in (0, 1, 3, None):
        file = tmp_path / f"test_{crashes}.py"
        file.write_text(TESTS.format(crashes=crashes))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    done = python(
        *("-m", "pytest", "-n", "2", "--dist", "loadfile"),
        *("-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path),
        PYTHONPATH=str(ROOT),
        PYTEST_ADDOPTS="",
    )
    said = done.stdout + done.stderr
    assert "3 failed, 17 passed" in said, said
    for crashes in (0, 1, 3):
        assert f"test_{crashes}.py::test_one_of_four[{crashes}]" in said
