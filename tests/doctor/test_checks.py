"""The self-test of ``keras-towers doctor``."""

import pytest
from rich.console import Console

from keras_towers import commands
from keras_towers.bench import runner
from keras_towers.commands import CommandResult
from keras_towers.doctor import checks
from keras_towers.doctor.checks import Status
from tests.bench.shared import RANK


# Rows with real workers are in `tests/bench/test_real_workers.py`, too.
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["horovod", "sync-replicas", "multi-worker"])
def test_two_processes_train_as_one(name):
    findings = checks.run_self_test(Console(), [name])
    assert [finding.name for finding in findings] == ["plain", name]
    for finding in findings:
        assert finding.state is Status.OK, finding.advice


def test_a_strategy_with_other_losses_fails(monkeypatch):
    losses = {"plain": [2.0, 1.0], "horovod": [2.0, 1.1]}
    monkeypatch.setattr(runner, "store", lambda *_: "a model")
    monkeypatch.setattr(
        runner,
        "run_workers",
        lambda row, *_: [RANK | {"losses": losses[row.name]}],
    )
    plain, horovod = checks.run_self_test(Console(), ["horovod"])
    assert (plain.state, horovod.state) == (Status.OK, Status.BAD)
    assert "loss differs from step 2 on" in horovod.advice


def test_a_self_test_that_fails_says_why(monkeypatch):
    ended = CommandResult(None, "", "")
    monkeypatch.setattr(commands, "run_command", lambda *_, **__: ended)
    (finding,) = checks.run_self_test(Console(), ["horovod"], timeout_s=1)
    assert finding.state is Status.BAD
    assert finding.name == "plain"
    assert "has not ended after 1 s" in finding.advice
