"""What ranks compare of a step, in a form that outlives its graph.

``fit/step/graph/program_text.py`` writes the text of a step, and
``step_agreement.py`` compares the texts.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_towers.fit.data.same_data import ROUNDING, Fingerprint
from keras_towers.foundation.object_types import Structure
from keras_towers.jobs.rendezvous import rank_checks


class Line(NamedTuple):
    """A line of the text of a step, for messages.

    Attributes:
        result: the type of an operation, and the dtype and shape of what it
            returns; or what ranks exchange.
        attributes: its settings, by their names.
        code: the line of code that has added it; empty: none.
    """

    result: str
    attributes: dict[str, str]
    code: str = ""

    def __str__(self) -> str:
        return f"{self.result} of {self.code}" if self.code else self.result


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramText:
    """The canonical text of a step.

    Attributes:
        checksum: 32 bits of the text without its real numbers.
        checksums: of each line, with its real numbers, in their order.
        described: the lines as messages show them, in few bytes: of large
            models there are tens of thousands, for as long as the strategy is
            used.
        reals: the real numbers, in their order.
    """

    checksum: int
    checksums: array.array[int]
    described: bytes
    reals: Sequence[np.ndarray] = ()

    @classmethod
    def of(
        cls,
        lines: Sequence[tuple[bytes, Line]],
        reals: dict[int, np.ndarray] | None = None,
    ) -> ProgramText:
        """Return the text, given its lines.

        Args:
            lines: the text of each, and how messages show it.
            reals: the real numbers that lines have besides, by their indices.
        """
        checksums = array.array("Q")
        for index, (text, _) in enumerate(lines):
            number = (reals or {}).get(index)
            values = b"" if number is None else number.tobytes()
            checksums.append(_checksum(text + values))
        described = json.dumps([line for _, line in lines]).encode()
        return cls(
            _checksum(b"\0".join(text for text, _ in lines)) % 2**32,
            checksums,
            zlib.compress(described, 1),
            [*(reals or {}).values()],
        )

    def line(self, index: int) -> Line | None:
        """Return a line, as messages show it; None: there are fewer."""
        texts = json.loads(zlib.decompress(self.described))
        return Line(*texts[index]) if index < len(texts) else None

    def first(self, number: int) -> int:
        """Return a checksum of the first lines."""
        return _checksum(self.checksums[:number].tobytes())

    def reals_and_slack(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the real numbers, and how far those of ranks may differ."""
        values, slacks = [np.zeros(0)], [np.zeros(0)]
        for given in self.reals:
            flat = given.ravel()
            if flat.dtype.kind == "c":
                flat = np.concatenate([np.real(flat), np.imag(flat)])
            wide = flat.astype("float64")
            values.append(wide)
            slack = ROUNDING[flat.dtype.itemsize]
            slacks.append(np.where(np.isfinite(wide), abs(wide), 0) * slack)
        return np.concatenate(values), np.concatenate(slacks)


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedStep:
    """A step in the form in which ranks compare it.

    Attributes:
        text: what it computes and exchanges.
        spec: the specs of the batch for which it was traced.
        fingerprint: of the global batch, which all ranks have; None: each has
            its own.
    """

    text: ProgramText
    spec: Structure = None
    fingerprint: Fingerprint | None = None

    @classmethod
    def of_exchanges(
        cls, exchanged: Sequence[str], fingerprint: Fingerprint | None = None
    ) -> ComparedStep:
        """Return a step of which ranks compare only what they exchange."""
        lines = [line_of_exchange(text) for text in exchanged]
        return cls(ProgramText.of(lines), fingerprint=fingerprint)

    @functools.cached_property
    def numbers(self) -> tuple[int, int]:
        """32-bit numbers, of the text without real numbers, and with them."""
        text = self.text
        return text.checksum, text.first(len(text.checksums)) % 2**32

    @property
    def shapes(self) -> str:
        """The static shapes of the tensors of a batch."""
        leaves = tf.nest.flatten(self.spec)
        return " ".join(str(getattr(leaf, "shape", None)) for leaf in leaves)


def line_of_exchange(described: str) -> tuple[bytes, Line]:
    """Return the line of an exchange, or of another variable, of a step."""
    text = rank_checks.without_numbers(described)
    return text.encode(), Line(described, {})


def _checksum(text: bytes) -> int:
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little")
