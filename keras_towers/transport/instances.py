"""The numbers by which TensorFlow knows collectives, for the keys of ours.

TensorFlow matches what ranks send by two numbers: a group of devices, and an
instance in it. The shape and dtype of an instance are fixed when it first runs;
another shape under the same number ends all collectives of the process.
"""

from __future__ import annotations

import hashlib

from keras_towers.errors import TowerError

FIXED = 1
"""The group of collectives whose size is part of their key."""

OVER_NCCL = 2
"""The same, on GPUs: a group is of one kind of devices."""

FIRST_OF_ROOMS = 3
"""The group of collectives with the first of ``ROOMS``; the others follow."""

ROOMS: tuple[int, ...] = tuple(
    (4 + part) * 2**octave for octave in range(2, 38) for part in range(4)
)
"""Numbers of elements that those of unknown size are padded to.

Such collectives have the same instance whatever their size, and the group tells
them apart. With more numbers there would be more groups, with fewer more
padding. None is 0: TensorFlow's gather of nothing ends the process.
"""


class InstanceKeys:
    """Numbers that all ranks compute alike, in whatever order they ask."""

    def __init__(self):
        self._texts: dict[int, str] = {}

    def number(self, *parts: object) -> int:
        """Return the instance of a collective, 0 to 2**31 - 1."""
        text = " ".join(map(str, parts))
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        number = int.from_bytes(digest) >> 1
        other = self._texts.setdefault(number, text)
        if other != text:
            raise TowerError(
                f"the collectives {other!r} and {text!r} have the same number, "
                f"{number}, by chance. Change the name or the shape of either."
            )
        return number
