"""Attributes that are replaced for a while, and methods over them."""

from keras_towers.fit.context import patches


class Thing:
    def name(self):
        return "thing"


def louder(instance, original):
    return original().upper()


def test_a_method_that_is_shadowed_inside_a_block_outlives_it():
    thing = Thing()
    with patches.shadowed(thing, {"name": lambda: "block"}):
        patches.shadow(thing, {"name": louder})
        assert thing.name() == "BLOCK"
    assert thing.name() == "THING"
    patches.unshadow(thing, ["name"])
    assert vars(thing) == {}


def test_what_was_there_before_is_there_again():
    thing = Thing()
    thing.name = before = lambda: "before"
    with patches.shadowed(thing, {"name": lambda: "block"}):
        patches.shadow(thing, {"name": louder})
    assert thing.name() == "BEFORE"
    patches.unshadow(thing, ["name"])
    assert vars(thing) == {"name": before}
