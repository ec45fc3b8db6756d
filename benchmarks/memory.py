"""Whether a process needs the memory that was planned for it.

``python -m benchmarks.memory`` trains models that need hundreds of megabytes,
each in processes of its own, and prints a table: the most memory of a process,
above what it had before the model was made, over what the strategy had planned.
Before that, a small model has trained: what a process has with any model is
TensorFlow's own.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from keras_towers.cli.bench import split
from keras_towers.foundation import commands
from keras_towers.foundation.object_types import JsonObject
from keras_towers.inspection.bench.cell_process import (
    peak_memory,
    reset_peak_memory,
)
from keras_towers.inspection.bench.rows import ROWS
from keras_towers.inspection.bench.runner import environment
from keras_towers.jobs.rendezvous.file_store import FileStore

_STEPS = 4
OPTIONS: dict[str, JsonObject] = {
    "whole": {},
    "updates": {"updates": "sharded"},
    "weights": {"weights": "sharded"},
}
ENGINES: tuple[str, ...] = ("tower", "horovod", "multi-worker", "byteps")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what it trains on.

    Attributes:
        build: builds the model.
        examples: the number of examples of a batch.
        inputs: the shape of an example of each input.
        words: the number of different tokens; None: inputs are floats.
        labels: the shape of the labels of an example; None: the tokens.
    """

    build: Callable[[], Any]
    examples: int
    inputs: Sequence[tuple[int, ...]]
    words: int | None = None
    labels: tuple[int, ...] | None = None

    @property
    def loss(self) -> Any:
        """The loss to compile the model with."""
        import keras

        if self.labels is not None:
            return "mse"
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def data(self, steps: int) -> Any:
        """Return random examples of a number of batches."""
        rng, number = np.random.default_rng(0), steps * self.examples
        x: Any = [
            rng.random((number, *shape), dtype="float32")
            if self.words is None
            else rng.integers(0, self.words, (number, *shape), dtype="int32")
            for shape in self.inputs
        ]
        if self.labels is None:
            return x[0], x[0]
        y = rng.random((number, *self.labels), dtype="float32")
        return (tuple(x) if len(x) > 1 else x[0]), y


def _dense() -> Any:
    from keras import Input, Sequential, layers

    body = [layers.Dense(2048, "tanh") for _ in range(8)]
    return Sequential([Input((2048,)), *body])


def _blocks(width: int, blocks: int, tokens: int, words: int) -> Any:
    import keras
    from keras import layers

    given = keras.Input((tokens,), dtype="int32")
    table = layers.ReversibleEmbedding(words, width)
    x = table(given)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(8, width // 8, dropout=0.1)
        x = layers.Add()([x, attention(normed, normed, use_causal_mask=True)])
        inner = layers.LayerNormalization()(x)
        inner = layers.Dense(4 * width, "gelu")(inner)
        inner = layers.Dropout(0.1)(layers.Dense(width)(inner))
        x = layers.Add()([x, inner])
    logits = table(layers.LayerNormalization()(x), reverse=True)
    return keras.Model(given, logits)


def _convolutions() -> Any:
    from keras import Input, Sequential, layers

    body: list[Any] = []
    for _ in range(12):
        body += [layers.Conv2D(32, 3, padding="same", use_bias=False)]
        body += [layers.BatchNormalization(), layers.Activation("relu")]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return Sequential([Input((64, 64, 3)), *body, *head])


def _lstm() -> Any:
    from keras import Input, Sequential, layers

    body = [layers.LSTM(512, return_sequences=True), layers.LSTM(512)]
    return Sequential([Input((128, 64)), *body, layers.Dense(10)])


def _tables() -> Any:
    import keras
    from keras import layers

    given = [keras.Input((8,), dtype="int32") for _ in range(4)]
    rows = [layers.Flatten()(layers.Embedding(100000, 64)(g)) for g in given]
    x = layers.Dense(256, "relu")(layers.Concatenate()(rows))
    return keras.Model(given, layers.Dense(10)(x))


CASES: dict[str, Case] = {
    "dense": Case(_dense, 320, [(2048,)], labels=(2048,)),
    "transformer": Case(
        functools.partial(_blocks, 256, 4, 256, 2000), 16, [(256,)], 2000
    ),
    "convolutions": Case(_convolutions, 32, [(64, 64, 3)], labels=(10,)),
    "lstm": Case(_lstm, 64, [(128, 64)], labels=(10,)),
    "tables": Case(_tables, 256, [(8,)] * 4, 100000, (10,)),
    "tied": Case(
        functools.partial(_blocks, 512, 1, 64, 32000), 16, [(64,)], 32000
    ),
}


def measure(task: JsonObject) -> None:
    """Train as one process of a cell, and store what it needed."""
    import keras
    import tensorflow as tf

    import keras_towers as kt
    from keras_towers.fit.step.reports.step_reports import planned_memory

    case = CASES[task["model"]]
    options: JsonObject = {"remat": task["remat"], **task["options"]}
    if task["engine"] == "tower":
        kt.virtual_towers(2)
        options["towers"] = 2
    with kt.strategy(task["engine"], **options) as strategy:
        small = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        small.compile("adam", "mse")
        small.fit(np.ones((8, 64)), np.ones((8, 64)), batch_size=8, verbose=0)
        del small
        # The data are not of the step.
        data = tf.data.Dataset.from_tensor_slices(case.data(_STEPS))
        data = data.batch(case.examples)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = reset_peak_memory()
        # Ranks then need not exchange the weights.
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(task["dtype"])
        model = case.build()
        model.compile("adam", case.loss)
        model.fit(data, verbose=0)
        measured = peak_memory() - before
        planned = planned_memory(strategy)
    rank = getattr(strategy, "rank", 0)
    result = {"measured": measured, "planned": planned}
    FileStore(Path(task["folder"])).put(str(rank), result)


def run(task: JsonObject, timeout_s: float) -> list[JsonObject]:
    """Run the processes of a cell; return what each has stored, or nothing."""
    row, launcher = ROWS[task["engine"]], list[str]()
    ranks = 1 if task["engine"] == "tower" else 2
    if ranks > 1:
        command = ["-m", "keras_towers.cli.main", "run"]
        launcher = [*command, *row.launcher(ranks)]
    with tempfile.TemporaryDirectory(prefix="keras-towers-memory-") as folder:
        worker = json.dumps({**task, "folder": folder})
        ended = commands.run_command(
            [sys.executable, *launcher, "-m", "benchmarks.memory", worker],
            timeout_s,
            environment({"CUDA_VISIBLE_DEVICES": ""}),
        )
        if ended.code != 0:
            print(ended.reason(timeout_s), file=sys.stderr)
        store = FileStore(Path(folder))
        found = [store.get(str(rank)) for rank in range(ranks)]
        return [] if None in found else found


def _tasks(
    models: str, engines: str, options: str, remat: str, dtype: str
) -> Iterator[JsonObject]:
    for model in split(models):
        for engine in split(engines):
            for name in split(options):
                for again in split(remat):
                    yield {
                        "model": model,
                        "engine": engine,
                        "options": OPTIONS[name],
                        "remat": again == "remat",
                        "dtype": dtype,
                    }


def main(
    models: str = ",".join(CASES),
    engines: str = ",".join(ENGINES),
    options: str = ",".join(OPTIONS),
    remat: str = "keep,remat",
    dtype: str = "float32",
    timeout: float = 300,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print measured over planned memory, of the process with most."""
    results = []
    for task in _tasks(models, engines, options, remat, dtype):
        found = run(task, timeout)
        line = f"{task['model']:13}{task['engine']:13}"
        line += f"{next(iter(task['options']), 'whole'):8}"
        line += "remat " if task["remat"] else "      "
        if not found:
            print(line, "failed", flush=True)
            continue
        most = max(found, key=lambda one: one["measured"])
        measured, planned = most["measured"], sum(most["planned"].values())
        results.append({**task, **most})
        parts = ", ".join(
            f"{name} {size / 1e6:.0f}"
            for name, size in most["planned"].items()
            if size
        )
        print(
            f"{line} {measured:6.0f} MB / {planned / 1e6:6.0f} MB = "
            f"{measured * 1e6 / planned:.2f}  ({parts})",
            flush=True,
        )
    if json_path:
        json_path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        measure(json.loads(sys.argv[1]))
    else:
        typer.run(main)
