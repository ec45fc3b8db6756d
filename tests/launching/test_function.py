"""Functions as jobs: ``kt.launch``, in scripts, threads and notebooks."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

import keras_towers as kt
from tests.kit.training import X, Y, classifier
from tests.launching import called
from tests.launching.jobs import all_gone

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_left():
    """Whatever happens, no process of a job is there afterwards."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert all_gone(list(left), 1)


def fit(model):
    return model.fit(X, Y, epochs=2, batch_size=8, verbose=0).history


def train(scale, built):
    # Sent with what it refers to.
    model = built()
    with kt.HorovodStrategy() as strategy:
        history = fit(model)
    print("trained", flush=True)
    return model, history, strategy.size * scale


def test_what_rank_0_returns_is_that_of_one_process(capsys):
    found, history, number = kt.launch(
        train, np=2, args=(3,), kwargs={"built": classifier}
    )
    wanted = classifier()
    expected = fit(wanted)
    for one, other in zip(
        found.get_weights(), wanted.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-6)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    assert isinstance(found.optimizer, type(wanted.optimizer))
    assert number == 6
    out = capsys.readouterr().out.splitlines()
    assert sorted(line for line in out if "trained" in line) == [
        "[0] trained",
        "[1] trained",
    ]


def test_an_error_of_a_rank_is_raised_with_its_traceback(tmp_path, capsys):
    """Also in a thread, where no signal can be awaited."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(kt.launch, called.fail, output=tmp_path)
        with pytest.raises(kt.TowerError, match="an error on rank 1:") as found:
            job.result()
    assert "ValueError: bad data" in str(found.value)
    assert "line" in str(found.value)
    assert ", in fail\n" in str(found.value)
    assert "launching/call.py" not in str(found.value)
    said = capsys.readouterr().err
    assert "[1] ValueError: bad data" in said
    assert "kt.launch: rank 1 ended with exit code 1" in said
    assert "ValueError: bad data" in (tmp_path / "rank.1.txt").read_text()


def test_ctrl_c_ends_the_ranks(tmp_path):
    def interrupt():
        until = time.monotonic() + 30
        while time.monotonic() < until and len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        kt.launch(called.wait, args=(tmp_path,))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unpicklable", "returned what cannot be pickled, lock: return"),
        ("killed", "was killed by SIGKILL"),
        ("early", "rank 0 ended before the function returned"),
        ("exit", "SystemExit: enough"),
    ],
)
def test_other_ends(how, said):
    with pytest.raises(kt.TowerError, match=said):
        kt.launch(called.ends, np=1, args=(how,))


def test_what_cannot_start(monkeypatch):
    with pytest.raises(kt.TowerError, match="np=0: give 1 or more"):
        kt.launch(print, np=0)
    lock = threading.Lock()
    with pytest.raises(kt.TowerError, match="<lambda> cannot be sent.*lock"):
        kt.launch(lambda: lock)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    with pytest.raises(kt.TowerError, match="is itself a rank of a job"):
        kt.launch(print)
