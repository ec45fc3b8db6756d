"""The models of the benchmark: its own, or the user's.

The initial weights and the data are stored once, so that they are the same for
all backends and processes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure
from keras_towers.inspection.user_models import (
    find_named,
    model_and_data,
    random_examples,
)

if TYPE_CHECKING:
    import keras
    import numpy as np

_WEIGHTS, _DATA = "weights.npz", "data.npz"


def small() -> keras.Model:
    """Build a 4-layer perceptron with 4 thousand parameters."""
    return _perceptron(48, 32, 3)


def large() -> keras.Model:
    """Build a 9-layer perceptron with 8.4 million parameters."""
    return _perceptron(1024, 1024, 8)


def _perceptron(features: int, width: int, hidden: int) -> keras.Model:
    import keras
    from keras import layers

    body = [layers.Dense(width, activation="relu") for _ in range(hidden)]
    return classifier([keras.Input((features,)), *body])


def classifier(layers: list[keras.Layer]) -> keras.Model:
    """Compile layers and ten logits, to be trained by SGD with momentum."""
    import keras

    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


MODELS = {"small": small, "large": large}


@dataclass(frozen=True)
class Stored:
    """A model with the initial weights and the data of all rows."""

    source: str
    folder: Path

    def store(self, examples: int) -> str:
        """Store weights and data, and return a title.

        Without data from the function, random examples are stored.
        """
        import keras
        import numpy as np

        model, *data = self._make()
        kind = ""
        if not data:
            data = list(random_examples(model, self.source, examples))
            kind = ", random examples"
        arrays = [
            _array(leaf, self.source) for leaf in keras.tree.flatten(data)
        ]
        lengths = sorted({len(array) for array in arrays})
        if len(lengths) != 1:
            raise TowerError(
                f"{self.source} returned {' and '.join(map(str, lengths))} "
                "examples; x and y need the same number"
            )
        numbers = list(range(len(arrays)))
        structure = keras.tree.pack_sequence_as(data, numbers)
        self.folder.mkdir(exist_ok=True)
        np.savez(self.folder / _DATA, np.array(json.dumps(structure)), *arrays)
        self._build_variables(model)
        np.savez(self.folder / _WEIGHTS, *model.get_weights())
        return f"{self.source}, {model.count_params():,} parameters{kind}"

    def build(self) -> keras.Model:
        """Build and compile the model with the stored weights."""
        model = self._make()[0]
        self._build_variables(model)
        # Never all of them beside the model: memory is measured.
        for variable, value in zip(
            model.weights, _values(self.folder / _WEIGHTS), strict=True
        ):
            variable.assign(value)
        return model

    def data(self, examples: int) -> tuple[Structure, Structure]:
        """Return inputs and labels, repeated if fewer are stored."""
        import keras
        import numpy as np

        encoded, *arrays = _values(self.folder / _DATA)
        structure = json.loads(str(encoded))
        chosen = np.arange(examples) % len(arrays[0])
        x, y = keras.tree.map_structure(lambda i: arrays[i][chosen], structure)
        return x, y

    def _build_variables(self, model: keras.Model) -> None:
        if not model.built:
            model(self.data(1)[0])

    def _make(self) -> list[Any]:
        """Return a compiled model, and x and y if the function gives them."""
        source = self.source
        make = MODELS.get(source) or find_named(source)
        model, data = model_and_data(make(), source, ["x, y"])
        if model.steps_per_execution != 1:
            raise TowerError(
                f"{source} returned a model that is compiled with "
                f"steps_per_execution={model.steps_per_execution}, but each "
                "step is timed: leave it out"
            )
        return [model, *data]


@dataclass(frozen=True)
class Workload:
    """The model, data and devices of one process."""

    model: Stored
    folder: Path
    rank: int
    size: int
    # This process's devices; empty: the row chooses.
    devices: Sequence[str]
    # Examples in a global batch.
    batch: int
    steps: int

    @functools.cached_property
    def data(self) -> tuple[Structure, Structure]:
        """The global batches of all steps, concatenated."""
        return self.model.data(self.steps * self.batch)

    @property
    def share(self) -> int:
        """The examples of this process in each step."""
        return self.batch // self.size

    def part(self) -> tuple[Structure, Structure]:
        """Return this process's share of each global batch."""
        import keras

        def rows_of_rank(array: np.ndarray) -> np.ndarray:
            shape = (self.steps, self.size, self.share)
            parts = array.reshape(*shape, *array.shape[1:])
            return parts[:, self.rank].reshape(-1, *array.shape[1:])

        x, y = keras.tree.map_structure(rows_of_rank, self.data)
        return x, y


def _values(path: Path) -> Iterator[Any]:
    """Yield stored arrays, one at a time."""
    import numpy as np

    with np.load(path, allow_pickle=False) as stored:
        for index in range(len(stored.files)):
            yield stored[f"arr_{index}"]


def _array(leaf: ArrayLike, source: str) -> np.ndarray:
    """Return a part of the user's data as an array."""
    import numpy as np

    array = np.asarray(leaf)
    if array.ndim == 0 or not len(array) or array.dtype.hasobject:
        raise TowerError(
            f"{source} must return arrays of examples as x and y, but among "
            f"them is {leaf!r:.80}"
        )
    return array


def main() -> None:
    """Store the model of the command line, and print its title as JSON."""
    source, folder, examples = sys.argv[1:]
    try:
        answer = {"title": Stored(source, Path(folder)).store(int(examples))}
    except TowerError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
