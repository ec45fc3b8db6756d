"""Kills workers of elastic jobs at random moments, and counts what survives.

To be run by hand, since it takes hours on few cores:

    python -m tests.processes.kill_trials --trials 20 --folder trials
    python -m tests.processes.kill_trials --kills 2 --trials 10 --folder trials

Each job has three workers and goes on with one. It has stood a trial if it ends
with exit code 0 and whoever got to the end has the weights of one process that
nobody disturbed. A second kill comes within ten seconds of the first. Results
are added to ``results.jsonl`` in the folder, and next to it is what each job
has printed. Trials are numbered from ``--seed``; the number decides who is
killed when, as far as processes can repeat that.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import time

from tests.launching.jobs import Launched

# By millions of weights: units of the hidden layers, and epochs.
MODELS = {"0.1": (310, 10), "2": (1400, 6), "20": (4470, 1)}
BATCHES = 20  # Of an epoch.
TRAVELS = ("none", "default")
WITHIN_S = 10.0
LIMIT_S = 150.0


def workers(folder: pathlib.Path) -> list[int]:
    """The processes that have trained and are alive, oldest first."""
    known = sorted(
        (folder / "workers").iterdir(), key=lambda file: file.stat().st_ctime
    )
    alive = []
    for file in known:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.name), 0)
            alive.append(int(file.name))
    return alive


def kill_one(folder: pathlib.Path, chance: random.Random) -> bool:
    """Kill one of the workers that train; False if there is none."""
    alive = workers(folder)
    if not alive:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(alive), signal.SIGKILL)
    return True


def trial(
    folder: pathlib.Path, model: str, travels: str, kills: int
) -> dict[str, object]:
    """Run a job in a new folder and kill its workers; what came of it."""
    chance = random.Random(folder.name)
    units, epochs = MODELS[model]
    folder.mkdir(parents=True)
    holds = [folder / "stay", *([folder / "slow"] if kills > 1 else [])]
    for hold in holds:
        hold.touch()
    job = Launched(
        folder,
        ("--min-np", "1", "-np", "3", "-m", "tests.processes.enduring")
        + (str(folder), travels, str(epochs), str(units)),
    )
    steps = epochs * BATCHES
    step = chance.randint(1, steps - 4 if kills == 1 else steps // 4)
    wait_s = chance.uniform(0, WITHIN_S)
    killed = []
    with contextlib.suppress(AssertionError):
        job.wait_for(folder / "steps", lines=step)
        time.sleep(chance.uniform(0, 0.1))
        killed.append(kill_one(folder, chance))
        if kills > 1:
            time.sleep(wait_s)
            killed.append(kill_one(folder, chance))
    for hold in holds:
        hold.unlink()
    done = job.finish(LIMIT_S)
    survivors = done.out.count(f"as undisturbed after {epochs} epochs")
    passed = done.code == 0 and survivors > 0 and all(killed)
    shutil.rmtree(folder)
    folder.with_name(f"{folder.name}.txt").write_text(f"{done.out}\n{done.err}")
    return {
        "model": model,
        "travels": travels,
        "kills": kills,
        "trial": folder.name,
        "step": step,
        "second_after_s": round(wait_s, 2) if kills > 1 else None,
        "killed": sum(killed),
        # By an exception in Horovod's C++ code, when they connected.
        "aborted": done.err.count("was killed by SIGABRT"),
        "survivors": survivors,
        "code": done.code,
        "seconds": round(done.seconds, 1),
        "passed": passed,
    }


def main() -> None:
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--trials", type=int, default=1, help="of each kind")
    parser.add_argument("--kills", type=int, default=1, choices=(1, 2))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--travels", nargs="+", default=TRAVELS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, travels, model in itertools.product(
        range(options.trials), options.travels, options.models
    ):
        name = f"{model}-{travels}-{options.kills}-{options.seed + number}"
        found.append(trial(folder / name, model, travels, options.kills))
        with (folder / "results.jsonl").open("a") as file:
            print(json.dumps(found[-1]), file=file)
        print(json.dumps(found[-1]), flush=True)
    passed = [one["passed"] for one in found]
    print(f"as undisturbed: {sum(passed)} of {len(passed)}")


if __name__ == "__main__":
    main()
