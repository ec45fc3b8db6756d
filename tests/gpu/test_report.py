"""What is reported of a session on GPUs, and where there is none."""

import os
import subprocess
import sys

import pytest

from keras_towers import reduction
from keras_towers.doctor import probe
from tests.gpu import __main__ as runner
from tests.gpu import machine, report

TESTS = """
import os, pytest

def test_good():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_left_out(number):
    pytest.skip("one | GPU")

def test_bad():
    numbers = [1, 2]
    assert numbers == [1, 3], "```"

@pytest.fixture
def broken():
    raise RuntimeError("no device")

def test_never_begun(broken):
    pass

def test_ends_its_process():
    os._exit(134)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    (folder / "test_some.py").write_text(TESTS)
    found = folder / "results.xml"
    options = ("-q", "-n", "1", "--dist", "load", f"--junitxml={found}")
    subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", *options, "."],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    return report.read(found)


def test_every_test_is_counted(results):
    assert results.passed == 1
    assert results.skipped == {"one | GPU": 2}
    failed = dict(results.failed)
    assert set(failed) == {
        f"test_some::test_{name}"
        for name in ("bad", "never_begun", "ends_its_process")
    }


def test_failures_are_told_by_their_first_lines(results):
    failed = dict(results.failed)
    assert "[1, 2] == [1, 3]" in failed["test_some::test_bad"]
    assert "no device" in failed["test_some::test_never_begun"]
    crashed = failed["test_some::test_ends_its_process"]
    assert "crashed while running" in crashed
    assert all(len(text.splitlines()) <= 8 for text in failed.values())


def test_the_report_is_markdown_whatever_is_said(results):
    rows = [("GPUs", "8 x A | B\nand more")]
    sections = [("Machine", report.table(rows))]
    sections += [("Tests", report.of_tests(results))]
    text = report.document(sections)
    assert "| GPUs | 8 x A \\| B and more |" in text
    assert "**1 passed, 3 failed, 2 skipped**" in text
    assert "* 2 x one | GPU" in text
    # What a failure has of a fence does not end its block.
    assert "````text\n" in text
    lines = text.splitlines()
    for fence in ("```", "````"):
        assert lines.count(fence) == lines.count(f"{fence}text")


def test_what_nvidia_says_where_there_is_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == "\n\n".join(["nvidia-smi: not found"] * 2)


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path):
    facts = {"tensorflow": "2.21.0", "gpus": [], "built_with_cuda": False}
    monkeypatch.setattr(probe, "look", lambda: facts)
    written = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["gpu", "--report", str(written)])
    assert runner.main() == 2
    said = capsys.readouterr().err
    assert "No GPU is visible to TensorFlow 2.21.0" in said
    assert not written.exists()


@pytest.mark.parametrize(
    ("kind", "number", "modes"),
    [
        ("cpu", 2, ["cpu", "gpu", "hierarchical", "collective"]),
        ("gpu", 1, []),
        ("gpu", 3, ["cpu", "gpu", "collective", "nccl"]),
        (
            "gpu",
            4,
            ["cpu", "gpu", "hierarchical", "collective", "nccl"],
        ),
    ],
)
def test_benchmark_has_the_modes_that_can_run(monkeypatch, kind, number, modes):
    def available(devices):
        return "GPU" in devices[0], ""

    monkeypatch.setattr(reduction, "nccl_available", available)
    assert runner.modes_on(kind, number) == modes


def test_benchmark_on_cpus_does_not_count_gpus(monkeypatch):
    commands = []

    def ran(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "a table")

    monkeypatch.setattr(runner.subprocess, "run", ran)
    options = runner.options_of(["--on", "cpu"])
    assert runner.run_bench(options, 5, {}) == ("```text\na table\n```", True)
    (command,) = commands
    assert command[command.index("--towers") + 1] == "2"
    assert "nccl" not in command[command.index("--modes") + 1]


def test_pytest_that_writes_no_results_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    text, well = runner.run_tests(runner.options_of([]), dict(os.environ))
    assert not well
    assert "pytest ended with 1" in text
