"""Which options of strategies go together, as the code itself says.

``python -m tests.docs.test_pairs`` prints the table of ``docs/strategies.md``.
"""

import itertools
import re

from keras_towers.fit.options import StrategyOptions
from keras_towers.foundation.errors import TowerError
from tests.docs.pages import ROOT
from tests.kit.meshes import layout_map, mesh_of


def _options():
    """What the table has a row for, and the options that ask for it."""
    return {
        "`layouts`": {"layouts": layout_map(mesh_of(1, 1), {})},
        '`weights="sharded"`': {"weights": "sharded"},
        '`updates="sharded"`': {"updates": "sharded"},
        "`micro_batches=2`": {"micro_batches": 2},
        '`micro_batches="auto"`': {"micro_batches": "auto"},
        '`batches="each"`': {"batches": "each"},
        '`batch_norm="tower"`': {"batch_norm": "tower"},
        "`average=False`": {"average": False},
        "`mode`": {"mode": "host"},
        "`packer`": {"packer": True},
        "`compression`": {"compression": "fp16"},
        "`sync_every`": {"sync_every": 4},
    }


def _refusal(options):
    """Why options are refused together; None: they work."""
    try:
        StrategyOptions(**options)
    except TowerError as error:
        _, _, reason = str(error).partition(": ")
        return reason.partition(". ")[0]
    return None


def table():
    """The lines of the table: each pair is named once."""
    options = _options()
    partners = {}
    for first, second in itertools.combinations(options, 2):
        reason = _refusal(options[first] | options[second])
        if reason is not None:
            partners.setdefault((first, reason), []).append(second)
    rows = {}
    for (first, reason), seconds in partners.items():
        rows.setdefault((reason, tuple(seconds)), []).append(first)
    lines = ["| | excludes | because |", "|---|---|---|"]
    for (reason, seconds), firsts in rows.items():
        because = re.sub(r'\w+_\w+(="\w+")?', r"`\g<0>`", reason)
        lines.append(
            f"| {', '.join(firsts)} | {', '.join(seconds)} | {because} |"
        )
    return lines


def test_the_page_says_what_is_refused_with_what():
    lines = table()
    page = (ROOT / "docs" / "strategies.md").read_text()
    assert "\n".join(["", *lines, "", ""]) in page
    # With shards, and with gradients that are not averaged.
    assert sum("`sync_every`" in line for line in lines) == 2


if __name__ == "__main__":
    print("\n".join(table()))
