"""Run all cases on this rank; rank 0 writes what the ranks found as JSON."""

import faulthandler
import json
import os
import sys
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Whoever started this may be gone: no rank outlives this.
faulthandler.dump_traceback_later(170, exit=True)

import keras_towers as kt  # noqa: E402

kt.virtual_towers(2)

import common  # noqa: E402
import other_cases  # noqa: E402, F401
import training_cases  # noqa: E402, F401

import keras_towers.horovod as hvd  # noqa: E402


def main(path, wanted):
    hvd.init()
    found = {}
    for name, function in common.CASES.items():
        if wanted and name not in wanted:
            continue
        start = time.monotonic()
        try:
            result = function()
        except Exception:
            result = {"error": traceback.format_exc()}
        found[name] = hvd.allgather_object(result)
        if hvd.rank() == 0:
            print(name, f"{time.monotonic() - start:.1f} s", flush=True)
            with open(path, "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
