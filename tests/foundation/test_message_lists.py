"""Messages name some of many things, and how many more there are."""

from keras_towers.foundation import settings
from keras_towers.foundation.message_lists import describe_each, listed
from keras_towers.jobs.rendezvous import rank_checks


def test_messages_name_some_of_many_ranks_and_each_value(monkeypatch):
    monkeypatch.setattr(settings, "MAX_RANKS_NAMED", 3)
    ended = {f"rank {rank}": "has ended" for rank in range(4)}
    all_of_few = "; ".join(f"rank {rank} has ended" for rank in range(4))
    assert describe_each(ended) == all_of_few
    many = {f"rank {rank}": "has ended" for rank in range(9)}
    assert describe_each(many | {"rank 7": "is lost"}) == (
        "rank 0 has ended; rank 1 has ended; rank 7 is lost; 6 more likewise"
    )
    assert listed(range(4)) == "0, 1, 2, 3"
    assert listed(range(5)) == "0, 1, 2 and 2 more"
    assert listed(range(2), number=9) == "0, 1 and 7 more"
    assert listed("abcd", 2, separator="; ") == "a; b and 2 more"
    values = [16] * 500 + [8] + [16] * 500
    assert rank_checks.describe_ranks(values) == (
        "rank 0: 16, rank 1: 16, rank 500: 8, 998 more: likewise"
    )
