"""A commit has the same tests everywhere; a seed draws others."""

import types

import pytest

from tests.kit import sampling, scripts

CASES = [*range(9), pytest.param(9, id="nine")]


class Item:
    """A test as pytest has it, marked by some marks."""

    def __init__(self, module, name, *marks):
        self.module, self.originalname = module, name
        self.marks = {mark.name: mark for mark in marks}
        self.get_closest_marker = self.marks.get

    def add_marker(self, decorator):
        self.marks[decorator.name] = decorator.mark


@pytest.fixture
def seeded(monkeypatch):
    return lambda seed: monkeypatch.setattr(sampling, "SEED", seed)


def test_a_draw_is_that_of_its_seed_in_any_process(seeded):
    seeded(1)
    assert sampling.draw("abcdefgh", 4)[0] == ["c", "e"]
    run = scripts.run_python(
        "-c",
        "from tests.kit import sampling; print(sampling.SEED)",
        **{sampling.SEEDED_BY: "7"},
    )
    assert run.stdout.split() == ["7"], run.stderr


def test_each_case_has_its_turn(seeded):
    seen = set()
    for seed in range(40):
        seeded(seed)
        cases = [
            case if hasattr(case, "marks") else pytest.param(case)
            for case in sampling.sample_of(CASES, 3)
        ]
        assert [case.values for case in cases] == [(n,) for n in range(10)]
        assert cases[9].id == "nine"
        drawn = [case.values for case in cases if not case.marks]
        assert len(drawn) == 4
        seen.update(drawn)
        kept, others = sampling.draw("abcd")
        assert len(kept) == 2 and sorted(kept + others) == list("abcd")
    assert len(seen) == len(CASES)


def test_tests_alternate(seeded):
    module = types.ModuleType("a_file")
    module.test_first = module.test_second = module.helper = None
    alternate, core = pytest.mark.alternate.mark, pytest.mark.core.mark
    fourth, runs = pytest.mark.alternate(turn=3).mark, {}
    for seed in range(19_992, 20_004):
        seeded(seed)
        tests = {
            "first": Item(module, "test_first", alternate),
            "second": Item(module, "test_second", alternate),
            "fourth": Item(module, "test_second", fourth),
            "core": Item(module, "test_second", alternate, core),
            "unmarked": Item(module, "test_second"),
        }
        sampling.alternate(tests.values())
        for name, test in tests.items():
            runs.setdefault(name, []).append("long" not in test.marks)
    assert runs == {
        "first": [True, *[False] * 5] * 2,
        "second": [False, True, *[False] * 4] * 2,
        "fourth": [False, False, False, True, False, False] * 2,
        "core": [True] * 12,
        "unmarked": [True] * 12,
    }
