"""Nothing differs in silence, nothing is told in vain, and lines are right."""

import pytest

from tests.kit.long import some_of
from tests.splitting.cases import CASES
from tests.splitting.cases.table import COUPLES
from tests.splitting.trial import analysed, tried

DEFAULT, EXACT = "default", "exact"

# What was proven once, although it differs.
ONCE_PROVEN = [
    "louder_for_five",
    "factor_from_a_table",
    "sliced_from_a_table",
    "diagonal_of_sum",
    "element_by_positives",
    "powers_of_nothing",
    "products_of_nothing",
    "counted_by_loop",
    "counted_if_positive",
    "counted_one_way_or_other",
    "indices_rolled",
    "printed",
]

# What the cases found and what is not mended yet.
_JACOBIAN = "gradients of each example are named, not their mean"
_NUMBERS = "numbers of examples that only say where they are"
# Here, without and with exact=True.
KNOWN = {
    "gradient_clipped_by_example_twice": _JACOBIAN,
    # What is equal, and told in vain.
    "kernels_of_each_example": "examples as channels",
    "sums_by_repeated_numbers": _NUMBERS,
    "sparse_product": _NUMBERS,
    "ragged_means": "lengths that follow from the examples",
    "array_written_forwards": "loops over examples",
}
# And here without it only.
KNOWN_BY_DEFAULT = {
    "only_the_diagonal": "the diagonal of all pairs",
    "same_on_both_branches": "branches that are alike",
}

_IN_VAIN = KNOWN | KNOWN_BY_DEFAULT

# `make test` runs those that reach what no other of its tests does, and draws
# one in so many of all the others.
KEPT = (
    "branch_of_the_step",
    "cropped_by_boxes",
    "experts_by_stitching",
    "none_left_out",
    "proxies_of_classes",
    "sigmoid_of_all_pairs",
    "sparse_attention_over_features",
    "sparse_product_of_rows",
    "sum_in_a_mean",
    "views_interleaved",
)
DRAWN = 20


def _all():
    """Each case on three towers, and with ``exact`` on two.

    What is said of a step does not follow from the number of towers, and both
    numbers share each last batch unevenly.
    """
    every = [(name, mode) for name in CASES for mode in (DEFAULT, EXACT)]
    kept = [(name, DEFAULT) for name in KEPT]
    rest = [_tried(*case) for case in every if case not in kept]
    return [*(_tried(*case) for case in kept), *some_of(rest, DRAWN)]


def _tried(name, mode):
    by_default = KNOWN_BY_DEFAULT if mode == DEFAULT else {}
    reason = (KNOWN | by_default).get(name)
    marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
    return pytest.param(name, mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize("name, mode", _all())
def test_hostile(name, mode):
    """A training is that of one device, or its line is told."""
    case, exact = CASES[name], mode == EXACT
    outcome = tried(case, 2 if exact else 3, exact=exact)
    assert outcome.verdict(case, exact) == "", outcome
    assert exact or outcome.verdict_of_analysis(case) == "", outcome


_ANALYSED = dict.fromkeys([*ONCE_PROVEN, *list(CASES)[::25]])


@pytest.mark.parametrize("name", [n for n in _ANALYSED if n not in _IN_VAIN])
def test_analysis(name):
    """Nothing is proven that differs, and the line is named that does it."""
    case = CASES[name]
    outcome = analysed(case)
    assert outcome.verdict_of_analysis(case) == "", outcome
    if case.truth == COUPLES and case.says is None:
        assert outcome.names_the_line, outcome
