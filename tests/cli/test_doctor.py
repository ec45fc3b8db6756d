"""``keras-towers doctor``: the state of machines, and its self-test."""

import pytest
from rich.console import Console
from typer.testing import CliRunner

from keras_towers.cli import doctor as doctor_lib
from keras_towers.cli.doctor import Finding, Status
from keras_towers.cli.main import app
from keras_towers.engines.byteps.byteps_recipe import BytePS
from keras_towers.engines.horovod.horovod_recipe import Horovod
from keras_towers.foundation import commands, compat
from keras_towers.foundation.commands import CommandResult
from keras_towers.inspection.bench import runner
from keras_towers.jobs.building.recipe import InstalledEngine
from tests.inspection.bench.shared import RANK

pytestmark = pytest.mark.alternate

FACTS = {
    "tensorflow": "2.21.0",
    "built_with_cuda": False,
    "gpus": [],
    "keras": "3.15.1",
    "backend": "tensorflow",
    "tested_versions": compat.TESTED_VERSIONS,
}
HOROVOD = InstalledEngine("0.28.1", "2.21.0", True, parts={"Gloo": True})
BYTEPS = InstalledEngine("0.2.5", "2.21.0", True)
BROKEN = InstalledEngine("0.28.1", "2.20.0", False, "no such symbol")
NIGHTLY = {"keras-nightly": "3.15.1"}
TWO = {"tensorflow": "2.21.0", "tensorflow-cpu": "2.20.0"}
UNINSTALL = "pip uninstall -y tensorflow tensorflow-cpu; pip install"
SWITCH = "KERAS_BACKEND=tensorflow"


@pytest.fixture
def doctor(monkeypatch):
    """Run the command on made-up facts; its exit code and its output."""

    def run(*arguments, horovod=HOROVOD, byteps=BYTEPS, **facts):
        state = facts if "error" in facts else {**FACTS, **facts}
        monkeypatch.setattr(doctor_lib, "tensorflow_state", lambda: state)
        monkeypatch.setattr(Horovod, "find_installed", lambda recipe: horovod)
        monkeypatch.setattr(BytePS, "find_installed", lambda recipe: byteps)
        wide = CliRunner(env={"COLUMNS": "200"})
        result = wide.invoke(app, ["doctor", *arguments])
        return result.exit_code, result.output

    return run


@pytest.mark.parametrize(
    ("code", "facts", "said"),
    [
        (0, {}, "0.28.1 for TensorFlow 2.21.0; built in: Gloo"),
        (0, {}, "No problems found."),
        (0, {"horovod": None}, "keras-towers install horovod"),
        (0, {"tensorflow": "2.99.0"}, "2.99.0 is untested"),
        (0, {"gpus": ["H"], "built_with_cuda": True}, "--with-nccl"),
        (0, {"gpus": ["H"] * 2, "built_with_cuda": True}, "--self-test tries"),
        (0, {"packages": {"Keras": NIGHTLY}}, "3.15.1 (keras-nightly)"),
        (0, {"packages": {"TensorFlow": TWO}}, UNINSTALL),
        (1, {"error": "ImportError: no"}, "cpu]'"),
        (1, {"keras_error": "ImportError: no"}, "--upgrade keras"),
        (1, {"compat_error": "X is gone"}, "X is gone"),
        (1, {"horovod": BROKEN}, "no such symbol"),
        (1, {"byteps": BROKEN}, "install byteps --rebuild"),
    ],
    ids=str,
)
def test_each_state_of_a_machine_is_found_with_advice(
    doctor, code, facts, said
):
    found, output = doctor(**facts)
    assert found == code and said in output, output
    if code:
        assert "What to do next" in output


def test_another_keras_is_not_advised_where_the_backend_is_another(doctor):
    code, output = doctor(backend="jax")
    assert code == 1
    assert SWITCH in output and "upgrade keras" not in output


@pytest.mark.parametrize(
    ("passed", "horovod", "code", "said"),
    [
        (True, HOROVOD, 0, "as one process"),
        (False, HOROVOD, 1, "[a] traceback"),
        (True, BROKEN, 1, "not run: see the problems above"),
    ],
)
def test_the_self_test_runs_only_where_all_works(
    doctor, monkeypatch, passed, horovod, code, said
):
    state = Status.OK if passed else Status.BAD
    advice = "" if passed else "[a] traceback"
    finding = Finding("it", "as one process", state, advice)

    monkeypatch.setattr(
        "keras_towers.cli.doctor.run_self_test", lambda console: [finding]
    )
    nccl = Finding("NCCL 2.27.3", "sums over all GPUs")
    monkeypatch.setattr("keras_towers.cli.doctor.try_nccl", lambda: nccl)
    found, output = doctor("--self-test", horovod=horovod)
    assert found == code and said in output
    assert ("[a] traceback" in output) != passed
    assert output.count("Self-test") == 1
    assert ("sums over all GPUs" in output) == (horovod is HOROVOD)


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        ("", Status.OK, "sums over"),
        ("InternalError: NCCL: no link", Status.WARNING, "NCCL: no link"),
    ],
)
def test_nccl_is_tried_on_demand(monkeypatch, failure, status, said):
    state = {"obstacle": "", "failure": failure, "version": "2.27.3"}
    monkeypatch.setattr(doctor_lib, "ask_python", lambda *ask: state)
    found = doctor_lib.try_nccl()
    assert (found.name, found.status) == ("NCCL 2.27.3", status)
    assert said in found.value + found.advice


def test_where_there_are_no_two_gpus_nccl_is_not_tried():
    found = doctor_lib.try_nccl()
    assert "needs at least two GPUs" in found.value


# Rows with real workers are in `test_real_workers.py`, too.
@pytest.mark.slow
@pytest.mark.long
def test_two_processes_train_as_one():
    findings = doctor_lib.run_self_test(Console(), ["horovod"])
    assert [finding.name for finding in findings] == ["plain", "horovod"]
    for finding in findings:
        assert finding.status is Status.OK, finding.advice


def test_a_strategy_with_other_losses_fails(monkeypatch):
    losses = {"plain": [2.0, 1.0], "horovod": [2.0, 1.1]}
    monkeypatch.setattr(runner, "store", lambda *_: "a model")
    monkeypatch.setattr(
        runner,
        "run_workers",
        lambda row, *_: [RANK | {"losses": losses[row.name]}],
    )
    plain, horovod = doctor_lib.run_self_test(Console(), ["horovod"])
    assert (plain.status, horovod.status) == (Status.OK, Status.BAD)
    assert "loss differs from step 2 on" in horovod.advice


def test_a_self_test_that_fails_says_why(monkeypatch):
    ended = CommandResult(None, "", "")
    monkeypatch.setattr(commands, "run_command", lambda *_, **__: ended)
    (finding,) = doctor_lib.run_self_test(Console(), ["horovod"], timeout_s=1)
    assert finding.status is Status.BAD
    assert finding.name == "plain"
    assert "has not ended after 1 s" in finding.advice
