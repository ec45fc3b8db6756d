"""``worth_keeping``: which results are kept, by work and prices."""

import random

from keras_towers.partition.timeline.kept_results import ALWAYS, worth_keeping


def cost_of(kept, users, work, prices):
    """The prices of what is kept, and the work for what is needed then."""
    needed = set()
    for place in sorted(users, reverse=True):
        if any(user in {ALWAYS, *(needed - kept)} for user in users[place]):
            needed.add(place)
    return sum(prices[p] if p in kept else work[p] for p in needed)


def test_a_product_is_kept_and_what_is_cheap_is_computed_from_it():
    # A product, its activation, and another product, which a gradient needs.
    users = {0: {1}, 1: {2, ALWAYS}, 2: {3}, 3: {ALWAYS}}
    work = {0: 9.0, 1: 1.0, 2: 9.0, 3: 1.0}
    prices = {0: 5.0, 1: 7.0, 2: 5.0, 3: 7.0}
    assert worth_keeping(users, work, prices) == {0, 2}
    # In the place of a product, what is computed from it.
    assert worth_keeping(users, work, {**prices, 3: 5.0}) == {0, 3}
    assert worth_keeping(users, work, dict.fromkeys(users, 99.0)) == set()


def test_no_single_result_would_be_better_to_keep():
    draw = random.Random(3)
    chosen = 0
    for size in range(1, 60):
        users = {
            place: {draw.choice([*range(place + 1, size), ALWAYS])}
            | set(draw.sample([*range(place + 1, size), ALWAYS], 1))
            for place in range(size)
        }
        work = {place: draw.random() for place in users}
        prices = {place: draw.choice([0.5, 2, 9]) for place in users}

        def cost(*kept, users=users, work=work, prices=prices):
            return cost_of(set(kept), users, work, prices)

        found = worth_keeping(users, work, prices)
        best = min(cost(), *map(cost, users))
        assert cost(*found) <= best + 1e-9
        chosen += len(found)
    assert chosen > 20
