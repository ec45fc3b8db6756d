"""Runs what is marked ``gpu`` and the benchmark, and writes one report.

``make test-gpu`` starts it. The exit code is 0 if all passed, 1 if something
failed, and 2 if there is no GPU.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from keras_towers.bench.rows import MODES
from keras_towers.doctor import checks, probe
from tests.gpu import machine, report
from tests.kit import gpus

ROOT = Path(__file__).parents[2]
# In a terminal that is wide enough for every table of the benchmark.
COLUMNS = "110"


def main() -> int:
    """Run all, print the report, and return the exit code."""
    options = options_of()
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
    tests, well = run_tests(options, environment)
    sections = [
        ("Machine", report.table(machine.rows())),
        ("GPUs", report.block(machine.gpus())),
        ("Tests", tests),
    ]
    if not options.no_bench:
        bench, bench_well = run_bench(options, len(found), environment)
        sections.append(("Benchmark", bench))
        well = well and bench_well
    text = report.document(sections)
    print(f"\n{text}")
    options.report.write_text(text, encoding="utf-8")
    print(f"Written to {options.report}. Please paste it into an issue.")
    return 0 if well else 1


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse arguments; None: those of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument(
        "--on",
        choices=["gpu", "cpu"],
        default="gpu",
        help="cpu: try the tests and the report on logical CPUs",
    )
    parser.add_argument(
        "--tests",
        metavar="ARGUMENTS",
        default="",
        help='more arguments of pytest, such as "-k nccl"',
    )
    parser.add_argument(
        "--bench",
        metavar="ARGUMENTS",
        default="",
        help='more arguments of keras-towers bench, such as "--repeats 1"',
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


def run_tests(
    options: argparse.Namespace, environment: dict[str, str]
) -> tuple[str, bool]:
    """Run the tests in a process of their own.

    It is one of pytest-xdist's, so that a crash costs one test.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = [
            *(sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu"),
            *("-n", "1", "--dist", "load", "-q", f"--junitxml={results}"),
            *shlex.split(options.tests),
        ]
        ended = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        try:
            found = report.read(results)
        except (OSError, ElementTree.ParseError) as error:
            text = f"pytest ended with {ended.returncode}: {error}"
            return report.block(text), False
    return report.of_tests(found), ended.returncode == 0


def modes_on(kind: str, number: int) -> list[str]:
    """The modes that can run on GPUs or on CPUs, as ``towers.in_mode``."""
    if number == 1:
        # One tower reduces nothing.
        return []
    # Only the benchmark needs it in this process.
    from keras_towers import reduction

    devices = [f"/device:{kind.upper()}:{index}" for index in range(number)]
    nccl, _ = reduction.nccl_available(devices)
    fit = {"nccl": nccl, "hierarchical": number % 2 == 0}
    return [mode for mode in MODES if fit.get(mode, True)]


def run_bench(
    options: argparse.Namespace, number: int, environment: dict[str, str]
) -> tuple[str, bool]:
    """Compare on all GPUs, or on two CPUs; what is printed is reported."""
    number = number if options.on == "gpu" else 2
    modes = modes_on(options.on, number)
    command = [
        *(sys.executable, "-m", "keras_towers", "bench"),
        *("--device", options.on, "--towers", str(number)),
        *("--models", "large,cnn", "--repeats", "3"),
        *(("--modes", ",".join(modes)) if modes else ()),
        *shlex.split(options.bench),
    ]
    print("$", *command[1:], flush=True)
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = ended.stdout
    if ended.returncode:
        said += f"\nexit code {ended.returncode}"
    return report.block(said), ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
