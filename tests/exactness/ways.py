"""Ways to train the cases of the contract: options of a strategy, by name.

``WAYS`` are those that the towers of one process and the ranks of a job both
take: ``test_contract.py`` and ``tests/processes/exact.py`` try each case.
"""

from keras_towers.inspection.conformance.cases import HARDEST

# Several optimizers, sparse gradients and state among them: what a way of
# exchanging or holding weights may get wrong.
MOST_UNLIKE = (
    *HARDEST,
    *("uneven", "wide", "loss-scale-overflow", "loss-scale-of-own-step"),
    *("counting-python", "regularizers"),
)
WAYS = {
    "": {},
    " in shares": {"updates": "sharded"},
    " with weights in shards": {"weights": "sharded"},
    " in micro-batches": {"micro_batches": 3},
    " computed again": {"remat": True},
}
OF_RANKS = {
    f"{way}{on}": {**options, "towers": towers}
    for way, options in WAYS.items()
    for on, towers in (("", 1), (" on two towers", 2))
}
