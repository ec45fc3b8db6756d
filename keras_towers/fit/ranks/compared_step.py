"""What ranks compare of a step, in a form that outlives its graph.

``traced_operations.py`` and ``traced_constants.py`` in ``fit/step`` describe a
step so, and ``step_agreement.py`` compares the descriptions.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_towers._types import Structure
from keras_towers.rendezvous import rank_checks


class OperationText(NamedTuple):
    """Describes an operation of a step.

    Attributes:
        result: its type, and the dtype and shape of what it returns.
        attributes: its settings, by their names.
        line: the line of code that has added it.
    """

    result: str
    attributes: dict[str, str]
    line: str

    def __str__(self) -> str:
        return f"{self.result} of {self.line}"


class ConstantText(NamedTuple):
    """Describes a constant of a step.

    Attributes:
        place: where the step uses it: a number that is equal on all ranks.
        digest: of its shape and dtype, and of integers and booleans.
        approximate: of real numbers: integers that differ by at most one
            between ranks whose numbers differ by rounding only.
        text: its first values, and the line of code that has added it.
        used_at: the index of the operation that first uses it.
    """

    place: int
    digest: int
    approximate: Sequence[int]
    text: str
    used_at: int = 0


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of a step.

    Attributes:
        checksum: 32 bits of the step.
        checksums: of each operation, in their order.
        described: describes each of them, in few bytes: of large models there
            are tens of thousands, for as long as the strategy is used.
    """

    checksum: int
    checksums: Sequence[int]
    described: bytes

    @classmethod
    def of(
        cls,
        checksum: int,
        checksums: Sequence[int],
        texts: Sequence[OperationText],
    ) -> Operations:
        """Return operations, given what describes each of them."""
        described = zlib.compress(json.dumps(texts).encode(), 1)
        return cls(checksum, array.array("Q", checksums), described)

    def first_beside(self, others: Sequence[int]) -> OperationText | None:
        """Return the first operation that others do not have.

        Args:
            others: the checksums of the operations of another step.

        Returns:
            It, or the first one in another order; None: there is none.
        """
        index = self._index_beside(others)
        if index is None:
            return None
        texts = json.loads(zlib.decompress(self.described))
        return OperationText(*texts[index])

    def _index_beside(self, others: Sequence[int]) -> int | None:
        counts = Counter(others)
        for index, checksum in enumerate(self.checksums):
            if not counts[checksum]:
                return index
            counts[checksum] -= 1
        pairs = enumerate(zip(self.checksums, others, strict=False))
        return next((k for k, (own, other) in pairs if own != other), None)


@dataclasses.dataclass(frozen=True)
class Constants:
    """The numbers among the constants of a step.

    Attributes:
        digest: a checksum of shapes and dtypes, and of the values of integers
            and booleans.
        approximate: three integers that differ by at most one between ranks
            whose real numbers differ by rounding only.
        described: describes each of them.
    """

    digest: int = 0
    approximate: tuple[int, int, int] = (0, 0, 0)
    described: Sequence[ConstantText] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedStep:
    """A step in the form in which ranks compare it.

    Attributes:
        exchanged: describes what they exchange, in its order.
        operations: its operations, which must be the same, too, on ranks that
            have traced it for the same specs; None: they are not compared.
        constants: its constants, which are compared with its operations.
        spec: the specs of the batch for which it was traced.
        fingerprint: integers of the global batch, which differ by at most one
            between ranks with the same batch; None: each has its own.
    """

    exchanged: Sequence[str]
    operations: Operations | None = None
    constants: Constants = Constants()
    spec: Structure = None
    fingerprint: tf.Tensor | None = None

    @functools.cached_property
    def numbers(self) -> tuple[list[int], Sequence[int]]:
        """The numbers that are equal on all ranks, and nearly equal ones."""
        kinds = map(rank_checks.without_numbers, self.exchanged)
        exact = [
            zlib.crc32("\n".join(kinds).encode()),
            0 if self.operations is None else self.operations.checksum,
            self.constants.digest,
            zlib.crc32(self.shapes.encode()),
        ]
        return exact, self.constants.approximate

    @property
    def shapes(self) -> str:
        """The static shapes of the tensors of a batch."""
        leaves = tf.nest.flatten(self.spec)
        return " ".join(str(getattr(leaf, "shape", None)) for leaf in leaves)

    def is_like(self, exact: Sequence[int], approximate: Sequence[int]) -> bool:
        """Whether it equals another step, given the numbers of that step."""
        own, nearly = self.numbers
        *same, same_sizes = (a == b for a, b in zip(own, exact, strict=True))
        pairs = zip(nearly, approximate, strict=True)
        same.append(all(abs(a - b) <= 1 for a, b in pairs))
        return all(same) or (same[0] and not same_sizes)
