"""A function of a real notebook as the ranks of a job."""

import os

import nbclient
import nbformat

from tests.launching.jobs import ROOT

RESULT = """
import os, signal, threading, time
import keras_towers as kt

class Answer:
    pass

offset = 40

def ask(number):
    print("rank", os.environ["HOROVOD_RANK"], "Größe ✓")
    answer = Answer()
    answer.value = offset + number
    return answer

answer = kt.launch(ask, np=2, args=(2,))
print(type(answer) is Answer, answer.value)
"""
ONE = """
print("first")
kt.launch(ask, np=1, args=(0,)).value
"""
ERROR = """
def fail():
    raise ValueError("bad data")

kt.launch(fail)
"""
INTERRUPTED = """
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
kt.launch(lambda: time.sleep(600))
"""


def text(cell, name="stdout"):
    return "".join(o["text"] for o in cell.outputs if o.get("name") == name)


def test_a_notebook(tmp_path, monkeypatch):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (RESULT, ONE, ERROR, INTERRUPTED)
    ]
    nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=60,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    result, one, error, interrupted = cells
    assert sorted(text(result).splitlines()) == [
        "True 42",
        "[0] rank 0 Größe ✓",
        "[1] rank 1 Größe ✓",
    ], result.outputs
    assert text(one) == "first\nrank 0 Größe ✓\n"
    assert one.outputs[-1]["data"]["text/plain"] == "40"
    assert error.outputs[-1]["ename"] == "TowerError"
    assert "ValueError: bad data" in error.outputs[-1]["evalue"]
    assert interrupted.outputs[-1]["ename"] == "KeyboardInterrupt"
    assert "kt.launch: stopped by SIGINT" in text(interrupted, "stderr")
