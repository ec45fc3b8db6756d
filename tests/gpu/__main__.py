"""Runs what is marked ``gpu`` and the benchmark, and writes one report.

``make test-gpu`` starts it. The exit code is 0 if all passed, 1 if something
failed, and 2 if there is no GPU.
"""

import argparse
import functools
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from keras_towers import subprocesses
from keras_towers.doctor import probe
from tests.kit import gpus

ROOT = Path(__file__).parents[2]
# What ends a block of output that may have fences of its own.
FENCE = "~" * 8
# Of a command.
LIMIT_S = 6 * 60 * 60
PYTHON = (sys.executable, "-m")
_BUILT_WITH = "import tensorflow as tf; print(tf.sysconfig.get_build_info())"
_QUERY = "--query-gpu=index,name,memory.total,compute_cap,driver_version"
MACHINE = {
    "Machine": (*PYTHON, "keras_towers", "doctor"),
    "GPUs": ("nvidia-smi", _QUERY, "--format=csv"),
    "How they are connected": ("nvidia-smi", "topo", "-m"),
    "TensorFlow is built with": (sys.executable, "-c", _BUILT_WITH),
    # TensorFlow loads CUDA, cuDNN and NCCL from packages.
    "Packages": (*PYTHON, "pip", "list"),
}


def main(arguments=None):
    """Run all, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--on", choices=["gpu", "cpu"], default="gpu")
    for kind, what in ("tests", "pytest"), ("bench", "keras-towers bench"):
        more = f"more arguments of {what}"
        parser.add_argument(f"--{kind}", default="", help=more)
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"))
    options = parser.parse_args(arguments)
    found = probe.tensorflow_state().get("gpus", [])
    if options.on == "gpu" and not found:
        print(
            "No GPU is visible to TensorFlow, so nothing was run: see "
            "`keras-towers doctor`. `python -m tests.gpu --on cpu` tries the "
            "tests on logical CPUs.",
            file=sys.stderr,
        )
        return 2
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        gpus.VARIABLE: options.on,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # Wide enough for every table of the benchmark.
        "COLUMNS": "110",
    }
    # In a process of pytest-xdist's, so that a crash costs one test.
    tests = (*PYTHON, "pytest", "tests/gpu", "-m", "gpu", "-n", "1")
    tests += ("--dist", "load", "-rs", "--tb=short")
    number = len(found) if options.on == "gpu" else 2
    rows = [f"tower:mode={mode}" for mode in modes_on(options.on, number)]
    bench = (*PYTHON, "keras_towers", "bench", "--device", options.on)
    bench += ("--towers", str(number), "--models", "large,cnn")
    bench += ("--repeats", "3", "--strategies", ",".join(["default", *rows]))
    tried = {
        "Tests": (*tests, *shlex.split(options.tests)),
        "Benchmark": (*bench, *shlex.split(options.bench)),
    }
    text, failed = "# keras_towers on GPUs\n", False
    for title, command in {**MACHINE, **tried}.items():
        said, code = run(command, environment)
        text += f"\n## {title}\n\n{FENCE}text\n{said.rstrip()}\n{FENCE}\n"
        failed |= title in tried and code != 0
    options.report.write_text(text, encoding="utf-8")
    print(f"Written to {options.report}. Please paste it into an issue.")
    return int(failed)


def run(command, environment):
    """Run a command, show what it says, and return that and its exit code."""
    print("$", *command, flush=True)
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        return f"{command[0]}: not found", 127
    with tempfile.TemporaryDirectory() as folder:
        log, shown = Path(folder, "log"), functools.partial(print, end="")
        ended = subprocesses.run(
            command, LIMIT_S, environment, log=log, on_line=shown
        )
    code = -1 if ended.code is None else ended.code
    return ended.stdout + f"\nexit code {code}" * bool(code), code


def modes_on(kind, number):
    """The modes that can run on GPUs or on CPUs, as ``towers.strategy``."""
    if number == 1:
        # One tower reduces nothing.
        return []
    # Only the benchmark needs them in this process.
    from keras_towers import reduction
    from keras_towers.strategies.modes import MODES

    devices = [f"/device:{kind.upper()}:{index}" for index in range(number)]
    nccl, _ = reduction.nccl_available(devices)
    fit = {"nccl": nccl, "hierarchical": number % 2 == 0}
    return [mode for mode in MODES if fit.get(mode, True)]


if __name__ == "__main__":
    sys.exit(main())
