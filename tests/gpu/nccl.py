"""A worker: ranks that sum over NCCL, be it on one GPU.

NCCL refuses two ranks on a GPU of one host, but takes ranks of which each says
that it is on another one: they reach each other over sockets, as machines do.
On CPUs the same checks run over the host, to try them.
"""

import functools
import os
import signal
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.kit.ranks import CHECKS, check, main, rank_here

os.environ["NCCL_HOSTID"] = f"rank-{rank_here()}"

import numpy as np
import tensorflow as tf

from keras_towers.engines.runtime.collective_transport import (
    CollectiveTransport,
)
from keras_towers.transport.engine_transport import EngineTransport
from tests.gpu.ranks import trains_as_one_gpu
from tests.gpu.towers import HARD
from tests.kit import gpus
from tests.processes import over_tensorflow  # noqa: F401
from tests.processes.small import RANK, Strategy

CASES = {name: functools.partial(trains_as_one_gpu, name) for name in HARD} | {
    "weights in shards": functools.partial(
        trains_as_one_gpu, "embedding-clipped", weights="sharded"
    )
}
# What a sum in another order may differ by, relative and absolute.
ROUNDING = {
    tf.float16: 4e-3,
    tf.bfloat16: 4e-2,
    tf.float32: 1e-6,
    tf.float64: 1e-14,
}


def summed_on(gpu, name, tensors):
    """What the ranks sum on their GPUs, or on their hosts."""
    over = Strategy()._config.transport
    if gpu is None:
        over.sum_on(None)
    return over.all_reduce(tensors, name)


@check
def ranks_sum_over_nccl():
    over = Strategy()._config.transport
    assert over.describe_nccl() == "ranks sum over NCCL"
    if isinstance(over, CollectiveTransport):
        assert over._gpu is not None
    else:
        assert not over._from_host


@check
def sums_are_those_of_the_host():
    for dtype, limit in ROUNDING.items():
        draw = tf.random.stateless_normal(
            [3, 1000], [RANK, 1], dtype=tf.float64
        )
        tensors = [*tf.unstack(tf.cast(draw, dtype)), tf.zeros([0], dtype)]
        there, here = (
            summed_on(where, f"{dtype.name}.{where}", tensors)
            for where in ("gpu", None)
        )
        for one, other in zip(there, here, strict=True):
            assert one.dtype == other.dtype == dtype
            np.testing.assert_allclose(
                tf.cast(one, tf.float64),
                tf.cast(other, tf.float64),
                rtol=limit,
                atol=limit,
            )


def die_within_a_sum():
    """Rank 1 is killed while ranks sum; the others have to end, too."""
    over = Strategy()._config.transport
    print("begins", flush=True)
    if RANK == 1:
        arguments = os.getpid(), signal.SIGKILL
        threading.Timer(2, os.kill, arguments).start()
    large = tf.ones([2**20])
    while True:
        over.all_reduce([large], "endless")


def try_on_cpus():
    """Sum on the host as if it were a GPU with NCCL."""
    if gpus.ON == "gpu":
        return
    from keras_towers.engines.horovod.horovod_transport import HorovodTransport

    attempt = EngineTransport.try_nccl
    for transport in (CollectiveTransport, HorovodTransport):
        transport.try_nccl = lambda self, gpu: attempt(self, "/device:CPU:0")


if __name__ == "__main__":
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try_on_cpus()
    CHECKS.update(CASES)
    if "die" in sys.argv:
        die_within_a_sum()
    main()
