"""What the cases found and what is not mended yet."""

from __future__ import annotations

DEFAULT, EXACT = "default", "exact"

_JACOBIAN = "gradients of each example are named, not their mean"
_NUMBERS = "numbers of examples that only say where they are"

# A case, and whether it is so without or with exact=True: what is wrong.
KNOWN: dict[tuple[str, str], str] = {
    ("gradient_clipped_by_example_twice", DEFAULT): _JACOBIAN,
    ("gradient_clipped_by_example_twice", EXACT): _JACOBIAN,
}

# What is equal, and told in vain.
for _name, _reason in {
    "kernels_of_each_example": "examples as channels",
    "sums_by_repeated_numbers": _NUMBERS,
    "array_written_forwards": "loops over examples",
}.items():
    KNOWN[_name, DEFAULT] = KNOWN[_name, EXACT] = _reason
for _name, _reason in {
    "only_the_diagonal": "the diagonal of all pairs",
    "same_on_both_branches": "branches that are alike",
}.items():
    KNOWN[_name, DEFAULT] = _reason
