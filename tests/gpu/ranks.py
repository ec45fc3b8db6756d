"""A worker: ranks on GPUs."""

import dataclasses
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from keras_towers.inspection.conformance.cases import CASES
from keras_towers.transport.devices import canonical
from tests.gpu.towers import HARD, TOLERANCE
from tests.kit import gpus
from tests.kit.ranks import CHECKS, check, main
from tests.processes.exact import assert_one_device
from tests.processes.small import RANK, Strategy, gather


def trains_as_one_gpu(name, **options):
    case = CASES[name]
    limit = max(case.tolerance, TOLERANCE)
    on_gpu = dataclasses.replace(case, tolerance=limit, in_graph=True)
    assert_one_device(on_gpu, **options)


CHECKS.clear()  # What tests.processes.exact has of its own.
CHECKS |= {name: functools.partial(trains_as_one_gpu, name) for name in HARD}


@check
def every_rank_has_a_gpu():
    (device,) = Strategy().extended.worker_devices
    assert canonical(device)[3] == gpus.ON.upper()
    if gpus.ON == "gpu":
        visible = tf.config.get_visible_devices("GPU")
        first, *others = gather([gpu.name for gpu in visible])
        assert (first in others) == (gpus.SHARED in os.environ)
    assert len(gather(RANK)) == 2


if __name__ == "__main__":
    tf.config.experimental.enable_tensor_float_32_execution(False)
    main()
