"""What is reported of a session on GPUs, and where there is none."""

import pytest

from keras_towers import reduction
from keras_towers.doctor import probe
from tests.gpu import __main__ as runner


def session(monkeypatch, tmp_path, facts, *arguments):
    """The exit code of a session, and its report if there is one."""
    monkeypatch.setattr(probe, "tensorflow_state", lambda: facts)
    path = tmp_path / "report.md"
    code = runner.main(["--report", str(path), *arguments])
    return code, path.read_text() if path.exists() else None


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path):
    assert session(monkeypatch, tmp_path, {"gpus": []}) == (2, None)
    assert "No GPU is visible to TensorFlow" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["doctor", "pytest", "bench"])
def test_what_is_said_is_reported(monkeypatch, tmp_path, failing):
    commands = []

    def ran(command, environment):
        commands.append(command)
        return f"{' '.join(command)} says ```", int(failing in command)

    monkeypatch.setattr(runner, "run", ran)
    facts = {"gpus": ["a"] * 5}
    found, text = session(monkeypatch, tmp_path, facts, "--on", "cpu")
    # That of the tests and the benchmark.
    assert found == (failing != "doctor")
    # What is said of a fence does not end its block.
    for command in commands:
        said = f"{' '.join(command)} says ```"
        assert f"{runner.FENCE}text\n{said}\n{runner.FENCE}" in text
    *_, tests, bench = commands
    assert "tests/gpu" in tests
    # On CPUs GPUs do not count.
    assert bench[bench.index("--towers") + 1] == "2"
    strategies = bench[bench.index("--strategies") + 1]
    assert "tower:mode=cpu" in strategies and "nccl" not in strategies


@pytest.mark.parametrize(
    ("kind", "number", "modes"),
    [
        ("gpu", 1, []),
        ("gpu", 3, ["nccl", "collective", "gpu", "cpu"]),
        ("gpu", 4, ["nccl", "collective", "hierarchical", "gpu", "cpu"]),
    ],
)
def test_benchmark_has_the_modes_that_can_run(monkeypatch, kind, number, modes):
    monkeypatch.setattr(
        reduction, "nccl_available", lambda devices: ("GPU" in devices[0], "")
    )
    assert runner.modes_on(kind, number) == modes
