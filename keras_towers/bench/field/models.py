"""The models of the field: this package's, or one of the user's.

What all rows start from is stored once, by the reference: Keras draws other
initial weights with every backend.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_towers import user_functions
from keras_towers.bench.field.examples import random_examples
from keras_towers.bench.models import MODELS, Wrap
from keras_towers.bench.trainers import mapped
from keras_towers.errors import TowerError

# Those that are trained by default.
FIELD_MODELS = ("small", "large", "cnn")
_WEIGHTS = "weights.npz"
_DATA = "data.npz"
_STRUCTURE = "data.json"


@dataclass(frozen=True)
class Stored:
    """A model with the initial weights and the data of all rows.

    Attributes:
        source: a key of ``MODELS``, or the user's function as
            ``module:function``.
        folder: where weights and data are stored.
    """

    source: str
    folder: Path

    @property
    def title(self) -> str:
        """A description for the reader of a table."""
        return title(self.source)

    def store(self, examples: int) -> dict[str, Any]:
        """Build the model and store what all rows start from.

        Args:
            examples: the number of examples that are needed; if there are
                fewer, they are repeated.

        Returns:
            The number of parameters, and a note for the reader of the table.

        Raises:
            TowerError: the user's function does not return what it has to.
        """
        import numpy as np

        note = ""
        if self.source in MODELS:
            model = MODELS[self.source].build()
            x, y = MODELS[self.source].data(examples)
        else:
            model, *data = _users(self.source)
            if not data:
                data = list(random_examples(model, self.source, examples))
                note = f"{self.source} returned no data: random examples"
            x, y = data
        arrays: list[Any] = []

        def index(leaf: Any) -> int:
            arrays.append(_array(leaf, self.source))
            return len(arrays) - 1

        structure = [mapped(index, x), mapped(index, y)]
        lengths = sorted({len(array) for array in arrays})
        if len(lengths) != 1:
            raise TowerError(
                f"{self.source} returned {' and '.join(map(str, lengths))} "
                "examples; x and y need as many"
            )
        chosen = np.arange(examples) % lengths[0]
        arrays = [array[chosen] for array in arrays]
        if not model.built:
            model(mapped(lambda i: arrays[i][:1], structure[0]))
        np.savez(self.folder / _DATA, *arrays)
        np.savez(self.folder / _WEIGHTS, *model.get_weights())
        (self.folder / _STRUCTURE).write_text(json.dumps(structure))
        return {"parameters": model.count_params(), "note": note}

    def build(self, wrap: Wrap | None = None) -> Any:
        """Build and compile the model with the stored weights."""
        if self.source in MODELS:
            model = MODELS[self.source].build()
        else:
            model = _users(self.source)[0]
        if not model.built:
            model(mapped(lambda array: array[:1], self.data(1)[0]))
        model.set_weights(_load(self.folder / _WEIGHTS))
        if wrap:
            model.optimizer = wrap(model.optimizer)
        return model

    def data(self, examples: int) -> tuple[Any, Any]:
        """Return the first stored inputs and labels."""
        arrays = _load(self.folder / _DATA)
        structure = json.loads((self.folder / _STRUCTURE).read_text())
        x, y = mapped(lambda index: arrays[index][:examples], structure)
        return x, y


def title(source: str) -> str:
    """Describe a model for the reader of a table."""
    return MODELS[source].title if source in MODELS else "your model"


def _load(path: Path) -> list[Any]:
    import numpy as np

    with np.load(path, allow_pickle=False) as stored:
        return [stored[f"arr_{index}"] for index in range(len(stored.files))]


def _array(leaf: Any, source: str) -> Any:
    """Return a part of the user's data as an array."""
    import numpy as np

    try:
        array = np.asarray(leaf)
    except (ValueError, TypeError):
        array = np.asarray(None)
    if array.ndim == 0 or not len(array) or array.dtype.hasobject:
        raise TowerError(
            f"{source} has to return arrays of examples as x and y, but among "
            f"them is {leaf!r:.80}"
        )
    return array


def _users(target: str) -> list[Any]:
    """Call the user's function; return a compiled model, and x and y if given.

    Raises:
        TowerError: there is no such function, it fails, or it returns
            something else.
    """
    import keras

    built = user_functions.call(target)
    model, *data = built if isinstance(built, (tuple, list)) else (built,)
    if not isinstance(model, keras.Model) or len(data) not in (0, 2):
        raise TowerError(
            f"{target} has to return a compiled Keras model, or (model, x, y), "
            f"but returned {built!r:.80}"
        )
    if not model.compiled:
        raise TowerError(
            f"{target} returned a model that is not compiled: call "
            "model.compile(optimizer, loss) in it"
        )
    if model.steps_per_execution != 1:
        raise TowerError(
            f"{target} returned a model that is compiled with "
            f"steps_per_execution={model.steps_per_execution}, but each step "
            "is timed: leave it out"
        )
    return [model, *data]
