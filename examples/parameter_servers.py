"""Share weights on a parameter server, and lose a worker.

``python examples/parameter_servers.py`` starts a server and two workers here,
kills one and starts it again: it goes on after the last batch that it trained
on. On several machines each task runs ``train`` with its ``TF_CONFIG``.
"""

import json
import os
import socket
import subprocess
import sys


def train():
    import keras
    import numpy as np

    import keras_towers as kt

    # In the server's task this line serves until training has ended.
    with kt.SyncReplicasStrategy() as strategy:
        x = np.random.default_rng(0).random((1024, 20), "float32")
        y = x.sum(axis=1, keepdims=True)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        name = f"worker {strategy.rank}"
        progress = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, _: print(f"{name}: epoch {epoch + 1}")
        )
        model.fit(x, y, epochs=6, verbose=0, callbacks=[progress])
    print(f"{name}: bias {model.weights[1].numpy()}")


def start(role, index, addresses, **options):
    cluster = {"ps": addresses[:1], "worker": addresses[1:]}
    config = {"cluster": cluster, "task": {"type": role, "index": index}}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}  # only errors of its C++ code
    options["env"] = {**os.environ, **quiet, "TF_CONFIG": json.dumps(config)}
    return subprocess.Popen([sys.executable, "-u", __file__], **options)


def main():
    # Three free ports, where the tasks will listen.
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for one in sockets:
        one.close()
    tasks = [start("ps", 0, addresses), start("worker", 0, addresses)]
    doomed = start("worker", 1, addresses, stdout=subprocess.PIPE, text=True)
    next(line for line in doomed.stdout if "epoch 2" in line)
    doomed.kill()
    print("worker 1 is killed after epoch 2, and started again", flush=True)
    tasks.append(start("worker", 1, addresses))
    sys.exit(max(task.wait() for task in tasks))


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        train()
    else:
        main()
