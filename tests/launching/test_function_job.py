"""Functions as jobs: ``kt.launch``, in scripts, threads and notebooks."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import nbclient
import nbformat
import psutil
import pytest

import keras_towers as kt
from keras_towers import settings
from tests.kit.compare import assert_close, assert_same_history, weights_of
from tests.kit.processes import all_gone, wait_until
from tests.kit.training import X, Y, classifier
from tests.launching import called


@pytest.fixture(autouse=True)
def nothing_left():
    """Whatever happens, no process of a job is there afterwards."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert all_gone(list(left))


def fit(model):
    return model.fit(X, Y, batch_size=8, verbose=0).history["loss"]


def train(scale, built):
    # Sent with what it refers to.
    model = built()
    with kt.HorovodStrategy() as strategy:
        loss = fit(model)
    print("trained", flush=True)
    return model, loss, strategy.size * scale


@pytest.mark.alternate(turn=3)
def test_what_rank_0_returns_is_that_of_one_process(capsys):
    found, loss, number = kt.launch(
        train, np=2, args=(3,), kwargs={"built": classifier}
    )
    wanted = classifier()
    assert_close(loss, fit(wanted), 1e-5)
    assert_same_history(weights_of(found), weights_of(wanted))
    assert isinstance(found.optimizer, type(wanted.optimizer))
    assert number == 6
    out = capsys.readouterr().out.splitlines()
    assert {"[0] trained", "[1] trained"} <= set(out)


def test_an_error_of_a_rank_is_raised_with_its_traceback(tmp_path, capsys):
    """Also in a thread, where no signal can be awaited."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(kt.launch, called.fail, output=tmp_path)
        with pytest.raises(kt.TowerError, match="an error on rank 1:") as found:
            job.result()
    assert "ValueError: bad data" in str(found.value)
    assert ", in fail\n" in str(found.value)
    assert "launching/function_job.py" not in str(found.value)
    said = capsys.readouterr().err
    assert "[1] ValueError: bad data" in said
    assert "kt.launch: rank 1 ended with exit code 1" in said
    assert "ValueError: bad data" in (tmp_path / "rank.1.txt").read_text()


def test_ctrl_c_ends_the_ranks(tmp_path):
    def interrupt():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(interrupt)
        kt.launch(called.wait, args=(tmp_path,))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unpicklable", "returned a lock, which cannot be pickled"),
        ("killed", "was killed by SIGKILL"),
        ("early", "rank 0 ended before the function returned"),
        ("exit", "SystemExit: enough"),
    ],
)
def test_other_ends(how, said):
    with pytest.raises(kt.TowerError, match=said):
        kt.launch(called.end, np=1, args=(how,))


def test_what_cannot_start(monkeypatch):
    with pytest.raises(kt.TowerError, match="np=0: give 1 or more"):
        kt.launch(print, np=0)
    with pytest.raises(kt.TowerError, match="np='2': give 1 or more"):
        kt.launch(print, np="2")
    with pytest.raises(kt.TowerError, match="takes a function, but got 2"):
        kt.launch(2)
    lock = threading.Lock()
    with pytest.raises(kt.TowerError, match="<lambda> cannot be sent.*lock"):
        kt.launch(lambda: lock)
    monkeypatch.setenv(settings.ENV_STORE, "127.0.0.1:1")
    monkeypatch.setenv(settings.ENV_SECRET, "secret")
    with pytest.raises(kt.TowerError, match="is itself a rank of a job"):
        kt.launch(print)


CELLS = (
    """
import os, sys, keras_towers as kt
class Answer:
    pass
offset = 40
def ask(number):
    print("rank", os.environ["HOROVOD_RANK"], "Größe ✓")
    print("to stderr", file=sys.stderr)
    answer = Answer()
    answer.value = offset + number
    return answer
answer = kt.launch(ask, np=2, args=(2,))
print(type(answer) is Answer, answer.value)
""",
    """
print("first")
kt.launch(ask, np=1, args=(0,)).value
""",
)


def test_a_notebook(tmp_path, monkeypatch):
    # A kernel is one of IPython: tests/kit/lean.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=100,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    said = [
        "".join(o["text"] for o in cell.outputs if o.get("name") == name)
        for cell in cells
        for name in ("stdout", "stderr")
    ]
    assert [sorted(text.splitlines()) for text in said[:2]] == [
        ["True 42", "[0] rank 0 Größe ✓", "[1] rank 1 Größe ✓"],
        ["[0] to stderr", "[1] to stderr", said[1].splitlines()[-1]],
    ]
    assert said[2] == "first\nrank 0 Größe ✓\n"
    assert cells[1].outputs[-1]["data"]["text/plain"] == "40"
