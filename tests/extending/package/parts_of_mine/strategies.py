"""Strategies, which keras_towers finds by their names."""

from typing import Any

from keras_towers.extending import ComposedStrategy
from parts_of_mine.hooks import Differences
from parts_of_mine.placements import Largest
from parts_of_mine.reductions import in_float64
from parts_of_mine.transports import FolderTransport


class InFloat64(ComposedStrategy):
    """Towers sum their gradients in float64."""

    def __init__(self, towers: int | None = None, **options: Any) -> None:
        super().__init__(towers, mode=in_float64, **options)


class BySize(ComposedStrategy):
    """Large weights are on the last tower, and others on the first.

    Args:
        towers: two or more names of devices.
        elements: from how many elements on a weight is large.
        **options: as for any strategy.
    """

    def __init__(
        self, towers: list[str], *, elements: int = 30, **options: Any
    ) -> None:
        placement = Largest(elements, towers[-1], towers[0])
        super().__init__(towers, placement=placement, **options)


class ThroughFolder(ComposedStrategy):
    """Processes exchange through a folder."""

    def __init__(self, towers: int = 1, **options: Any) -> None:
        options.setdefault("compression", Differences())
        super().__init__(towers, transport=FolderTransport(), **options)
