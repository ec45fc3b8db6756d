"""Names that all workers have dropped, and no others."""

from keras_towers.parameter_servers.connection import Dropped


class Model:
    """Something that is in a cycle of references, as Keras models are."""

    def __init__(self):
        self.me = self


def test_what_one_worker_still_has_is_kept():
    chief, other = Dropped(2), Dropped(2)
    for worker in (chief, other):
        worker.drop_with(Model(), "a")
    kept = Model()
    chief.drop_with(Model(), "b")
    other.drop_with(kept, "b")
    assert chief.heard([chief.news(), other.news()]) == ["a"]
    assert chief.news() == other.news() == []
    del kept
    # It is found out where something else has been made.
    other.drop_with(Model(), "c")
    chief.drop_with(Model(), "c")
    assert sorted(chief.heard([chief.news(), other.news()])) == ["b", "c"]


def test_news_of_a_worker_that_comes_back_count_once():
    chief = Dropped(2)
    assert chief.heard([[], ["a"]]) == []
    assert chief.heard([[], ["a"]]) == []
    assert chief.heard([["a"], []]) == ["a"]
