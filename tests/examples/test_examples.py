"""What is in ``examples/`` runs as its first lines say."""

import os
import re
import runpy
import shlex
import socket
import stat
import sys

import pytest

from tests.kit.processes import Launched
from tests.kit.scripts import ROOT, run_python

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(
    path
    for path in EXAMPLES.iterdir()
    if path.suffix in (".py", ".sh", ".yaml")
)


@pytest.mark.core
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_is_short_and_listed(path):
    assert len(path.read_text().splitlines()) < 70
    listed = (EXAMPLES / "README.md").read_text()
    assert f"| [`{path.name}`]({path.name}) |" in listed


# The pages' first example, and snippets, train the same way.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits", "test accuracy 9"),
        ("contrastive", "a weight to one device"),
        ("own_model", "largest relative difference"),
        ("own_transport", "rank 0 of 1 over a folder"),
    ],
)
def test_scripts_of_one_process(name, said, tmp_path, monkeypatch, capsys):
    if name == "digits":
        pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert said in out
    # What no metric tracks is shown as 0 at the end of an epoch.
    assert "loss: 0.0000e+00" not in out
    if "largest difference" in out:
        difference = re.search(r"largest difference .*: (\S+)$", out, re.M)
        assert float(difference[1]) < 1e-4


def launched(name, folder):
    """Run an example by the command in its first lines; what it writes."""
    text = (EXAMPLES / name).read_text()
    command = re.search(r"``(keras-towers run [^`]+)``", text)[1]
    command = command.replace("examples/", f"{EXAMPLES}/")
    arguments = tuple(shlex.split(command)[2:])
    # As the launcher sets it where nobody has.
    level = {"TF_CPP_MIN_LOG_LEVEL": "1"}
    done = Launched(folder, *arguments, **level).finish(200)
    assert done.code == 0, done.out + done.err
    assert_quiet(done.err)
    return done.out, done.err


@pytest.mark.slow
@pytest.mark.long
def test_a_script_of_horovod(tmp_path):
    pytest.importorskip("horovod.common")
    out, err = launched("horovod_script.py", tmp_path)
    assert err.count("`import horovod.keras` gives keras_towers.horovod") == 1
    assert float(re.search(r"error of the saved model: (\S+)", out)[1]) < 0.5


@pytest.mark.slow
@pytest.mark.long
def test_a_slow_worker_is_not_waited_for(tmp_path):
    out, _ = launched("sync_replicas.py", tmp_path)
    counted = r"(\d+) updates; used by replica: (\d+) (\d+) (\d+)"
    found = re.search(counted, out)
    assert found, out
    updates, *fast, slow = map(int, found.groups())
    # What the slow one has in time adds updates, or comes third to one.
    assert updates >= 80 and sum(fast) + slow >= 2 * updates, out
    assert slow < min(fast), out
    assert not re.search(r"dropped: 0 0 0\b", out)


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_is_killed():
    done = run_python(
        str(EXAMPLES / "parameter_servers.py"), TF_CPP_MIN_LOG_LEVEL="0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, _, after = done.stdout.partition("is killed")
    assert "worker 1: epoch 3" not in before
    assert "worker 1: epoch 1" not in after
    one, other = re.findall(r"bias (\S+)", after)
    assert one == other
    assert_quiet(done.stderr)


# What TensorFlow says in any process that imports it, and we of training.
USUAL = re.compile(
    r"WARNING: All log messages before absl::InitializeLog|I0000 .* port\.cc:"
    r"|(SyncReplicas|Horovod)Strategy: |ps 0 |keras-towers run: |`import horov"
    # On a busy machine, at the end of the job.
    r"|the chief waits for worker"
)


def assert_quiet(err):
    tags = re.compile(r"^\[[^]]*\] ")
    lines = [tags.sub("", line) for line in err.splitlines()]
    assert not [line for line in lines if line and not USUAL.match(line)]


# What a job of a cluster runs.
BEGIN = """
import os, signal
import keras
import numpy as np
import keras_towers as kt

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).random((64, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""
PLAIN = "model.fit(x, x[:, :1], 8, epochs=2, verbose=0)"
# It is told to end in its first run, as the machine is wanted for others.
BACKED_UP = """
def stop(batch, logs):
    if batch == 3 and not os.path.exists("told"):
        open("told", "w").close()
        os.kill(os.getpid(), signal.SIGUSR1)

told = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
with kt.HorovodStrategy() as strategy:
    callbacks = [kt.Backup("backup"), *[told] * strategy.is_chief]
    model.fit(x, x[:, :1], 8, epochs=2, verbose=0, callbacks=callbacks)
"""
END = """
with open(f"weights-{os.getpid()}.txt", "w") as file:
    file.write(repr(model.get_weights()))
"""


def weights_of(folder):
    """What the processes of a job have trained."""
    return [path.read_text() for path in folder.glob("weights-*.txt")]


STAND_INS = {
    # Two tasks of one node.
    "srun": """
    while [[ "$1" == --* ]]; do shift; done
    for rank in 0 1; do
        SLURM_STEP_ID=$$ SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2 \\
            SLURM_PROCID=$rank "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait $pid || code=$?; done
    exit ${code:-0}
    """,
    "scontrol": 'echo "$@" >> scontrol.txt',
    "python": f'exec {sys.executable} "$@"',
}


@pytest.mark.slow
@pytest.mark.long
def test_slurm(tasks, tmp_path):
    """A job that is told to end is requeued, and goes on."""
    pytest.importorskip("horovod.common")
    (tmp_path / "train.py").write_text(BEGIN + BACKED_UP + END)
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/bash\n" + text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    script = EXAMPLES / "slurm.sh"
    variables = {
        "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
    }
    for _ in range(2):
        assert weights_of(tmp_path) == []
        tasks.run("bash", script, folder=tmp_path, **variables)
        tasks.finish()
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    one, other = weights_of(tmp_path)
    assert one == other


@pytest.mark.slow
@pytest.mark.long
def test_kubernetes(tasks, tmp_path):
    """Two pods, as their Job describes them, train one model."""
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("horovod.common")
    text = (EXAMPLES / "kubernetes.yaml").read_text()
    parts = {part["kind"]: part for part in yaml.safe_load_all(text)}
    assert parts.keys() == {"Secret", "Service", "Job"}
    secret, service, job = (
        parts[kind] for kind in ("Secret", "Service", "Job")
    )
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    # What gives pod 0 its name before it is ready.
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
    }
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    variables = {}
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            key = variable["valueFrom"]["secretKeyRef"]
            assert key["name"] == secret["metadata"]["name"]
            value = secret["stringData"][key["key"]]
        variables[variable["name"]] = value
    assert int(variables["KERAS_TOWERS_SIZE"]) == spec["completions"]
    host, port = variables["KERAS_TOWERS_RENDEZVOUS"].split(":")
    assert host == f"{name}-0.{pod['subdomain']}" and int(port)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables["KERAS_TOWERS_RENDEZVOUS"] = f"127.0.0.1:{port}"
    script = tmp_path / "train.py"
    script.write_text(BEGIN + PLAIN + END)
    program, *arguments = container["command"]
    assert program == "keras-towers" and arguments.pop() == "/app/train.py"
    for index in range(2):
        variables["JOB_COMPLETION_INDEX"] = str(index)
        command = sys.executable, "-m", "keras_towers", *arguments, script
        tasks.run(*command, folder=tmp_path, **variables)
    tasks.finish()
    one, other = weights_of(tmp_path)
    assert one == other


NOTEBOOK = EXAMPLES / "towers.ipynb"


def read_notebook():
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs_of(notebook):
    """All outputs, of two trainings that learn and have the same weights."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    text = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
    assert "largest relative difference" in text
    difference = re.search(r"largest difference of a weight: (\S+)", text)
    # Rounding, after hundreds of steps.
    assert float(difference[1]) < 1e-3
    assert float(re.search(r"accuracy ([\d.]+)%", text)[1]) > 95
    return outputs


# What it shows is tried by the examples that are scripts.
@pytest.mark.long
@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    # It draws: tests/kit/lean.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    notebook = read_notebook()
    nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    assert outputs_of(notebook)


def test_what_the_notebook_shows_is_fit_to_be_seen():
    for output in outputs_of(read_notebook()):
        assert output.get("name") != "stderr"
        assert output.output_type != "error"
    assert not re.search(r"/(home|root|tmp|Users)/", NOTEBOOK.read_text())
