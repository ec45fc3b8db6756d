"""A placement."""

import math

import keras


class Largest:
    """Places large weights on one device, and all others on another.

    Args:
        elements: the number from which a weight is large.
        of_large: the device of these.
        of_others: the device of all others.
    """

    def __init__(self, elements: int, of_large: str, of_others: str) -> None:
        self.elements = elements
        self.of_large, self.of_others = of_large, of_others

    def __call__(self, variable: keras.Variable) -> str:
        is_large = math.prod(variable.shape) >= self.elements
        return self.of_large if is_large else self.of_others
