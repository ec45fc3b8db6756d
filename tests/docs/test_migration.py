"""Every row of the pages on migration is so, and their scripts run."""

import ast
import contextlib
import inspect
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import options
from keras_towers.transport.devices import short_name
from tests.docs.pages import ROOT, blocks
from tests.docs.test_commands import COMMANDS, options_of
from tests.kit.compare import assert_all_close
from tests.kit.processes import Launched

PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("migration", "horovod", "byteps", "tensorpack")
]


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        section: the heading of its section.
        there: its first cell.
        here: its second cell.
    """

    section: str
    there: str
    here: str

    @property
    def code(self) -> list[str]:
        """The code in its second cell."""
        return re.findall(r"`([^`]+)`", self.here)

    @property
    def expressions(self) -> list[ast.expr]:
        """What is Python in it; options alone are those of a function ``_``."""
        found = []
        for code in self.code:
            text = code.removeprefix("with ").rstrip(":")
            if re.fullmatch(r"\w+=\S+", text):
                text = f"_({text})"
            with contextlib.suppress(SyntaxError):
                found.append(ast.parse(text, mode="eval").body)
        return found


def rows() -> list[Row]:
    """All rows of the pages."""
    found, section = [], ""
    for line in "\n".join(page.read_text() for page in PAGES).splitlines():
        if line.startswith("## "):
            section = line[3:]
        # Above the rows of each table are its head and a rule.
        if line.startswith("|---"):
            found.pop()
        elif line.startswith("| "):
            cells = line.strip("|").split(" | ")
            found.append(Row(section, *map(str.strip, cells[:2])))
    return found


class Script(NamedTuple):
    """A script before and after it has been migrated, and how to start it."""

    before: str
    after: str
    command: str


def scripts() -> dict[str, Script]:
    """The scripts of the pages, by the strategy that each is given."""
    return dict(script for page in PAGES for script in scripts_of(page))


def scripts_of(page: Path) -> Iterator[tuple[str, Script]]:
    """The scripts of one page, each with its strategy."""
    commands = blocks(page, "bash")
    for block in blocks(page, "diff"):
        lines = block.code.splitlines()
        before, after = (
            "\n".join(line[1:] for line in lines if line[:1] != other)
            for other in "+-"
        )
        # Where one is started by a launcher, the next block says how.
        end = block.line + len(lines)
        command = [c.code for c in commands if end < c.line < end + 5]
        name = re.search(r"\w+Strategy\(.*\)|DataParallel\(\)", after)[0]
        yield name, Script(before, after, "".join(command).strip())


ROWS = rows()
SCRIPTS = scripts()
HOROVOD = "From Horovod"
REPLICAS = "From TensorFlow 1's SyncReplicasOptimizer"
DEVICES = ["/cpu:0", "/cpu:1"]

# What the scripts start with; n is the number of processes.
BEGIN = """
import keras
import numpy as np

import keras_towers as kt

n = 2
x = np.random.default_rng(0).random((192, 20), "float32")
y = x.sum(axis=1, keepdims=True)


def make_model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((20,)), *layers])


"""
# How a process of a job hands in its model.
END = """

import os
np.savez(f"model-{os.getpid()}.npz", *model.get_weights())
"""
_BLOCK = re.compile(r"with (kt\.\w+\(.*\)|strategy):")


@pytest.fixture(autouse=True)
def no_distribution():
    yield
    keras.distribution.set_distribution(None)


# What takes the options, and has the attributes, that a section's rows name.
KINDS = {
    "From tf.distribute": "MultiWorkerTowerStrategy",
    REPLICAS: "SyncReplicasStrategy",
}


def assert_takes(cls, name, value):
    """A class has an option, which a row may leave open: ``mode=...``."""
    accepted = inspect.signature(cls).parameters
    if name not in accepted:
        assert "options" in accepted
        options.StrategyOptions(**({} if value is ... else {name: value}))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.there)
def test_code_in_a_row_can_be_used(row):
    """Options, attributes, functions; ``test_commands.py`` has commands."""
    cls, last = getattr(kt, KINDS.get(row.section, "TowerStrategy")), None
    for node in row.expressions:
        path = ast.unparse(getattr(node, "func", node))
        given = {o.arg: o.value for o in getattr(node, "keywords", ())}
        if isinstance(node, ast.Constant) and last:
            # Another value of the option before.
            assert_takes(cls, last, node.value)
        elif path == "_":
            ((last, value),) = given.items()
            of_keras = last == "gradient_accumulation_steps"
            taker = keras.optimizers.SGD if of_keras else cls
            assert_takes(taker, last, ast.literal_eval(value))
        elif path.endswith("Strategy") and not path.startswith("tf."):
            cls = getattr(kt, path.removeprefix("kt."))
            inspect.signature(cls).bind(*getattr(node, "args", ()), **given)
            for last, value in given.items():
                assert_takes(cls, last, ast.literal_eval(value))
        elif path.startswith("strategy."):
            assert hasattr(cls, path.removeprefix("strategy."))
        elif path.startswith(("kt.", "keras.")):
            if path.startswith("kt.elastic"):
                pytest.importorskip("horovod")
            named = eval(path, {"kt": kt, "keras": keras})
            if isinstance(node, ast.Call):
                inspect.signature(named).bind(*node.args, **given)


def of(section, part):
    """The row of a section with this in its first cell."""
    (found,) = [r for r in ROWS if r.section == section and part in r.there]
    return found


@pytest.mark.parametrize(
    "name", ["`MirroredStrategy(devices)", "`MirroredStrategy()", "`OneDevice"]
)
def test_devices_are_those_of_tensorflow(name):
    row, names = of("From tf.distribute", name), {"devices": DEVICES}
    stock = eval(row.there.strip("`"), vars(tf.distribute), names)
    ours = eval(f"kt.{row.code[0]}", {"kt": kt}, names)
    found, wanted = (
        [*map(short_name, each.extended.worker_devices)]
        for each in (ours, stock)
    )
    assert found == wanted


def test_arguments_of_sync_replicas():
    """Those that are not there have no column beside them."""
    stock = tf.compat.v1.train.SyncReplicasOptimizer
    ours = inspect.signature(kt.SyncReplicasStrategy).parameters
    for name in list(inspect.signature(stock.__init__).parameters)[1:]:
        is_here = name in of(REPLICAS, f"`{name}`").code
        assert is_here == (name in ours)
    strategy = kt.SyncReplicasStrategy(total_num_replicas=3)
    assert strategy.replicas_to_aggregate == strategy.total_num_replicas == 3


def test_warnings_of_stalls():
    row = of(HOROVOD, "STALL_CHECK")
    option = options_of(COMMANDS.commands["run"])[row.code[0]]
    assert option.envvar == row.there.strip("`")


def run_here(code, **names):
    """Run a script in this process; the weights of its model."""
    namespace = {"tf": tf, "kt": kt, "devices": DEVICES, **names}
    exec(BEGIN + code, namespace)
    return namespace["model"].get_weights()


def on_one_device(name):
    """The weights of a script without its strategy."""
    code = _BLOCK.sub("with contextlib.nullcontext():", SCRIPTS[name].after)
    code = re.sub(r"strategy = .*\nn = .*\n", "", code)
    if "each" in name:
        # Each of two towers draws a batch.
        code = code.replace("batch_size=32", "batch_size=64")
    return run_here(code, contextlib=contextlib)


def test_scripts_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("TowerStrategy(devices)", 'TowerStrategy(2, batches="each")'):
        wanted = on_one_device(name)
        assert_all_close(run_here(SCRIPTS[name].after), wanted, 1e-5)
    # What stood there before.
    stock = SCRIPTS["TowerStrategy(devices)"]
    assert_all_close(run_here(stock.before), run_here(stock.after), 1e-5)
    script = SCRIPTS["DataParallel()"]
    mine = run_here(script.after)
    keras.distribution.set_distribution(None)
    plain = re.sub(r"keras\.distribution\.set_.*", "", script.after)
    assert_all_close(mine, run_here(plain), 1e-5)


def models_of(folder):
    """The weights that each process of a job has ended with."""
    models = []
    for path in sorted(folder.glob("model-*.npz")):
        with np.load(path) as found:
            models.append([found[name] for name in found.files])
    return models


def run_job(folder, code, command, begin=BEGIN):
    """Run a script as its page says; the weights of all processes."""
    # TensorFlow hears of the task when keras_towers is imported.
    (folder / "train.py").write_text(begin + code + END)
    program, run, *arguments = shlex.split(command)
    assert (program, run) == ("keras-towers", "run")
    done = Launched(folder, *arguments).finish()
    assert done.code == 0, done.out + done.err
    return models_of(folder)


JOBS = [
    ("HorovodStrategy()", "horovod.keras"),
    ("BytePSStrategy()", "byteps.tensorflow.keras"),
    ("MultiWorkerTowerStrategy()", ""),
    ("SyncReplicasStrategy(replicas_to_aggregate=2)", ""),
]


# Other jobs of each engine are in tests/processes.
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "as_it_was"),
    [
        *((name, module, False) for name, module in JOBS),
        *((name, module, True) for name, module in JOBS if module),
    ],
)
def test_scripts_of_several_processes(
    name, module, as_it_was, tmp_path, monkeypatch
):
    """As they are migrated, and as they were.

    There ranks read every second row, and train as one device on all of them.
    """
    engine, script = module.partition(".")[0], SCRIPTS[name]
    if engine:
        pytest.importorskip(f"{engine}.common")
    code, begin = script.after, BEGIN
    if as_it_was:
        assert f"import {module} as" in script.before
        code = script.before
        begin = BEGIN.replace("keras_towers as kt", "tensorflow as tf")
    models = run_job(tmp_path, code, script.command, begin)
    assert len(models) == 2
    monkeypatch.chdir(tmp_path)
    wanted = on_one_device(name)
    for found in models:
        assert_all_close(found, wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_asynchronous_workers_of_a_parameter_server(tmp_path):
    """They learn, and end with the same model."""
    name = "DistributedParameterServerStrategy(sync=False)"
    script = SCRIPTS[name]
    one, other = run_job(tmp_path, script.after, script.command)
    assert_all_close(one, other, 1e-5)
    begun = run_here("model = make_model()")
    pairs = zip(one, begun, strict=True)
    assert any(np.abs(after - before).max() > 1e-3 for after, before in pairs)


@pytest.mark.slow
@pytest.mark.long
def test_horovodrun(tasks, tmp_path):
    """The script for Horovod that stood there before."""
    pytest.importorskip("horovod.common")
    launcher = shutil.which("horovodrun") or f"{sys.prefix}/bin/horovodrun"
    # By default a rank waits 30 s for the other one to import TensorFlow.
    options = "--gloo-timeout-seconds", 250, "-np", 2
    begin = BEGIN.replace("keras_towers as kt", "tensorflow as tf")
    script = begin + SCRIPTS["HorovodStrategy()"].before + END
    (tmp_path / "train.py").write_text(script)
    python = sys.executable, "-m", "keras_towers"
    tasks.run(launcher, *options, *python, "train.py", folder=tmp_path)
    tasks.finish(250)
    one, other = models_of(tmp_path)
    assert_all_close(one, other, 1e-5)
