"""What is in the wheel and in the source distribution, and that it suffices."""

import re
import tarfile
import zipfile

import pytest

from tests.docs.pages import blocks
from tests.kit.scripts import ROOT
from tests.kit.wheels import build, install_alone

pytestmark = pytest.mark.core

BYTEPS, HOROVOD = (
    f"keras_towers/engines/{engine}/headers" for engine in ("byteps", "horovod")
)
# Besides modules of Python.
OTHERS = """
    keras_towers/py.typed {byteps}/README.md {byteps}/always/numa.h
    {byteps}/always/patience.h
    {byteps}/always/tensorflow/stream_executor/stream.h
    {byteps}/host/cuda_runtime.h {byteps}/host/nccl.h
    {horovod}/README.md {horovod}/stream.h {horovod}/moved/llvm/ADT/ArrayRef.h
    {horovod}/moved/llvm/ADT/SmallVector.h
    {horovod}/moved/tensorflow/compiler/xla/client/xla_builder.h
    keras_towers-{version}.dist-info/METADATA
    keras_towers-{version}.dist-info/RECORD
    keras_towers-{version}.dist-info/WHEEL
    keras_towers-{version}.dist-info/entry_points.txt
    keras_towers-{version}.dist-info/licenses/LICENSE
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_files_of_the_wheel(wheel):
    """Nothing runs when Python starts, and nothing is outside the package."""
    version = re.fullmatch(r"keras_towers-(.+)-py3-none-any\.whl", wheel.name)
    others = OTHERS.format(
        byteps=BYTEPS, horovod=HOROVOD, version=version[1]
    ).split()
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "keras_towers").rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as files:
        assert sorted(files.namelist()) == sorted([*modules, *others])
        entry_points = files.read(others[-2]).decode()
    assert "keras-towers = keras_towers.cli.main:app" in entry_points


SCRIPT = """
import keras
import numpy as np

x = np.random.default_rng(0).random((64, 4)).astype("float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
print(model.fit(x, x[:, :1], verbose=0).history["loss"])
"""


@pytest.mark.long
@pytest.mark.slow
def test_the_wheel_runs_without_the_checkout(wheel, tasks, tmp_path):
    python = install_alone(wheel, tmp_path / "alone")
    (example, *_) = blocks(ROOT / "README.md", "python")
    ends = f"assert kt.__file__.startswith({str(tmp_path)!r})\n"
    (tmp_path / "example.py").write_text(example.code + ends)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = python, "-m", "keras_towers"
    run = "run", "-np", "2", "--strategy", "multi-worker", "script.py"
    for words in (("example.py",), ("doctor",), run):
        tasks.run(*command, *words, folder=tmp_path, PYTHONPATH="")
    tasks.finish()


def test_the_files_of_the_source_distribution(tmp_path):
    """Whoever has it can read what the README links to, and test it."""
    with tarfile.open(build("sdist", tmp_path)) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    linked = re.findall(r"\]\(([^)#:]+)[)#]", (ROOT / "README.md").read_text())
    assert "docs/index.md" in linked
    tests = {
        path.relative_to(ROOT).as_posix()
        for folder in (
            "benchmarks",
            "docs",
            "examples",
            "keras_towers",
            "tests",
        )
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    needed = {"pyproject.toml", "Makefile", *linked, *tests}
    assert not needed - names
