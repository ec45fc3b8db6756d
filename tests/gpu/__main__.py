"""Runs what is marked ``gpu`` and the benchmark, and writes one report.

``make test-gpu`` starts it. The exit code is 0 if all passed, 1 if something
failed, and 2 if there is no GPU.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_towers.doctor import checks, probe
from tests.kit import gpus

ROOT = Path(__file__).parents[2]
# In a terminal that is wide enough for every table of the benchmark.
COLUMNS = "110"
_QUERY = "--query-gpu=index,name,memory.total,compute_cap,driver_version"
_BUILT_WITH = """
import tensorflow as tf
for name, value in tf.sysconfig.get_build_info().items():
    print(name, value)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print the report, and return the exit code."""
    options = options_of(arguments)
    facts = probe.look()
    found = facts.get("gpus", [])
    if options.on == "gpu" and not found:
        print(_no_gpu(facts), file=sys.stderr)
        return 2
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        gpus.VARIABLE: options.on,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        ),
        "COLUMNS": COLUMNS,
    }
    python = (sys.executable, "-m")
    said = {
        title: run(command, environment)[0]
        for title, command in {
            "Machine": (*python, "keras_towers", "doctor"),
            "GPUs": ("nvidia-smi", _QUERY, "--format=csv"),
            "How they are connected": ("nvidia-smi", "topo", "-m"),
            "TensorFlow is built with": (sys.executable, "-c", _BUILT_WITH),
            # TensorFlow loads CUDA, cuDNN and NCCL from packages.
            "Packages": (*python, "pip", "list"),
        }.items()
    }
    # In a process of pytest-xdist's, so that a crash costs one test.
    tests = ("pytest", "tests/gpu", "-m", "gpu", "-n", "1", "--dist", "load")
    commands = {"Tests": [*tests, "-q", "-rs", "--tb=short"]}
    commands["Tests"] += shlex.split(options.tests)
    if not options.no_bench:
        commands["Benchmark"] = bench_command(options, len(found))
    codes = []
    for title, command in commands.items():
        said[title], code = run([*python, *command], environment)
        codes.append(code)
    text = "\n\n".join(
        [
            "# keras_towers on GPUs",
            *(f"## {title}\n\n{block(text)}" for title, text in said.items()),
        ]
    )
    options.report.write_text(f"{text}\n", encoding="utf-8")
    print(f"Written to {options.report}. Please paste it into an issue.")
    return int(any(codes))


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; None: those of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument(
        "--on",
        choices=["gpu", "cpu"],
        default="gpu",
        help="cpu: try the tests and the report on logical CPUs",
    )
    for kind, what, example in (
        ("tests", "pytest", "-k nccl"),
        ("bench", "keras-towers bench", "--repeats 1"),
    ):
        parser.add_argument(
            f"--{kind}",
            metavar="ARGUMENTS",
            default="",
            help=f'more arguments of {what}, such as "{example}"',
        )
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"))
    return parser.parse_args(arguments)


def _no_gpu(facts: dict[str, Any]) -> str:
    """Why nothing can run, and what to do."""
    if "error" in facts:
        return f"TensorFlow does not work: {facts['error']}"
    advice = [finding.advice for finding in checks.devices(facts)]
    return "\n".join(
        [
            "No GPU is visible to TensorFlow "
            f"{facts['tensorflow']}, so nothing was run. See `keras-towers "
            "doctor`; `python -m tests.gpu --on cpu` tries the tests on "
            "logical CPUs.",
            *filter(None, advice),
        ]
    )


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[str, int]:
    """Run a command, show what it says, and return that and its exit code."""
    print("$", *command, flush=True)
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        return f"{command[0]}: not found", 127
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    said = "".join(lines)
    if process.returncode:
        said += f"\nexit code {process.returncode}"
    return said, process.returncode


def block(text: str) -> str:
    """Text as it is, in a fence that it does not close itself."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def bench_command(options: argparse.Namespace, number: int) -> list[str]:
    """Compare on all GPUs, or on two CPUs."""
    number = number if options.on == "gpu" else 2
    rows = [f"tower:mode={mode}" for mode in modes_on(options.on, number)]
    return [
        *("keras_towers", "bench", "--device", options.on),
        *("--towers", str(number), "--models", "large,cnn", "--repeats", "3"),
        *("--strategies", ",".join(["default", *rows])),
        *shlex.split(options.bench),
    ]


def modes_on(kind: str, number: int) -> list[str]:
    """The modes that can run on GPUs or on CPUs, as ``towers.in_mode``."""
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
