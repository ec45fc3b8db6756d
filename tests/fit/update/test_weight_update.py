"""``WeightUpdate``: what it refuses."""

import pytest

from keras_towers.fit.options import StrategyOptions
from keras_towers.foundation.errors import TowerError
from keras_towers.strategies.base import strategy_for_dry_run
from keras_towers.transport.absent_ranks import AbsentRanks


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("shards", "advice"),
    [
        ("weights", 'give weights="whole" and updates="once" in'),
        ("updates", 'give updates="once" in'),
    ],
)
def test_a_custom_loop_over_ranks_says_how_variables_stay_whole(
    shards, advice, given
):
    """Whoever gave the option can leave it out; else memory required it."""
    options = StrategyOptions(**{shards: "sharded"} if given else {})
    strategy = strategy_for_dry_run(["/cpu:0"], options, AbsentRanks(2))
    if given:
        advice = f'add shard_over="process" or leave {shards} out in'
    else:
        strategy._divide(shards)
    with pytest.raises(TowerError, match=f"{advice} a custom training loop"):
        strategy._update.apply_in_replica(None)
