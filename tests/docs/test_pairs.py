"""The documentation says which options go together as the code does."""

from tests.docs import pairs
from tests.docs.pages import ROOT


def test_the_page_says_what_is_refused_with_what():
    lines = pairs.table()
    assert "\n".join(lines) in (ROOT / "docs" / "strategies.md").read_text()
    # With shards, and with gradients that are not averaged.
    assert sum("`sync_every`" in line for line in lines) == 2
