"""Measure one strategy on one model, in this process, and print one JSON line.

Usage:
    python -m keras_towers.cli.bench_worker --model large \
        --strategy stock-default --towers 2

A process of its own for every measurement, because TensorFlow's devices and
threads can be set only once and a strategy leaves traces for the next.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from keras_towers.cli import bench_devices
from keras_towers.cli.bench_models import MODELS, build_adoption_model
from keras_towers.cli.bench_strategies import (
    OURS,
    STRATEGIES,
    make_contender,
    make_towers,
)
from keras_towers.cli.bench_timing import (
    SHORT_EPOCH_STEPS,
    SHORT_EPOCHS,
    WARM_UP_BATCHES,
    differences,
    epoch_cost_s,
    make_timer,
)

BATCH_SIZE = 64
ADOPTIONS = 4
# How many batches each asynchronous tower takes while one time is measured.
ROUNDS = 3


def measure_training(
    model_name: str, strategy: str, devices: list[str], batches: int
) -> dict[str, Any]:
    """Train, and time the steps and what an epoch costs beside them.

    Args:
        model_name: a key of ``MODELS``.
        strategy: one of ``STRATEGIES``.
        devices: the devices to train on.
        batches: how many steps to time, after the warm-up.

    Returns:
        Milliseconds of every timed step (of an asynchronous one: the mean
        with some that follow it), the seconds that an epoch costs beside
        its steps, and the losses, by which rows can be checked to agree.
    """
    bench_model = MODELS[model_name]
    contender = make_contender(strategy, devices, bench_model.build)
    over = ROUNDS * len(devices) if contender.asynchronous else 1
    warm_up = max(WARM_UP_BATCHES, over)
    steps = warm_up + batches + over
    x, y = bench_model.data(steps * BATCH_SIZE)
    short = SHORT_EPOCH_STEPS * BATCH_SIZE
    timer = make_timer()

    def fit(examples: int, epochs: int) -> Any:
        return contender.model.fit(
            x[:examples],
            y[:examples],
            batch_size=BATCH_SIZE,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[timer],
        )

    with contender.around_fit:
        history = fit(len(x), epochs=1)
        times = timer.batches[warm_up:]
        step_ms = [1e3 * seconds for seconds in differences(times, over)]
        fit(short, epochs=SHORT_EPOCHS)
    return {
        "step_ms": step_ms,
        "epoch_cost_s": epoch_cost_s(timer.epochs, step_ms),
        "loss": history.history["loss"][-1],
        "mode": contender.mode,
        "jit_compile": bool(contender.model.jit_compile),
    }


def measure_adoption(strategy: str, devices: list[str]) -> dict[str, Any]:
    """Time taking a model of about 100 MB over and giving it back.

    Args:
        strategy: one of ``OURS``.
        devices: the towers.

    Returns:
        Seconds to adopt, to release, and to copy the same bytes once in
        numpy, each a list with one number for every time; and the bytes.
    """
    model = build_adoption_model()
    variables = [*model.variables, *model.optimizer.variables]
    arrays = [variable.numpy() for variable in variables]
    adopt_s, release_s, copy_s = [], [], []
    for _ in range(ADOPTIONS):
        start = time.perf_counter()
        copies = [array.copy() for array in arrays]
        copy_s.append(time.perf_counter() - start)
        del copies
        start = time.perf_counter()
        with make_towers(strategy, devices) as towers:
            towers.adopt(model)
            end = time.perf_counter()
            adopt_s.append(end - start)
        release_s.append(time.perf_counter() - end)
    return {
        "bytes": sum(array.nbytes for array in arrays),
        "adopt_s": adopt_s,
        "release_s": release_s,
        "copy_s": copy_s,
    }


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m keras_towers.cli.bench_worker",
        description="Measure one strategy on one model; print one JSON line.",
    )
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--strategy", choices=STRATEGIES, default="plain")
    parser.add_argument("--towers", type=int, default=1)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--adoption",
        action="store_true",
        help="time adopting and releasing a 100 MB model instead",
    )
    what.add_argument(
        "--facts",
        action="store_true",
        help="print what is known of this machine instead",
    )
    arguments = parser.parse_args()
    if arguments.towers < 1 or arguments.batches < 1:
        parser.error("--towers and --batches must be at least 1")
    if arguments.adoption and arguments.strategy not in OURS:
        parser.error(f"--adoption needs a strategy of {', '.join(OURS)}")
    return arguments


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parse_arguments()
    if arguments.facts:
        print(json.dumps(bench_devices.machine_facts()))
        return
    try:
        devices = bench_devices.prepare_devices(
            arguments.device, arguments.towers
        )
    except bench_devices.DeviceError as error:
        sys.exit(str(error))
    if arguments.adoption:
        result = measure_adoption(arguments.strategy, devices)
    else:
        result = measure_training(
            arguments.model, arguments.strategy, devices, arguments.batches
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
