"""What the cases found and what is not mended yet."""

from __future__ import annotations

DEFAULT, EXACT = "default", "exact"

_UNBUILT = "layers that only the step builds are not exchanged for"
_AFTER = "what uses variables after their update is told without a line"
_CTC = "CTC calls functions that are not known"

# A case, and whether it is so without or with exact=True: what is wrong.
KNOWN: dict[tuple[str, str], str] = {
    ("gram_of_the_batch", EXACT): _UNBUILT,
    ("returns_of_the_batch", EXACT): _UNBUILT,
    ("advantages_made_normal", EXACT): _UNBUILT,
    ("entropy_of_the_mean", EXACT): _UNBUILT,
    ("temperature_that_learns", EXACT): _UNBUILT,
    ("returns_of_the_batch", DEFAULT): _UNBUILT,
    ("entropy_of_the_mean", DEFAULT): _UNBUILT,
    ("temperature_that_learns", DEFAULT): _UNBUILT,
    ("array_written_backwards", DEFAULT): "the loop is named, not the write",
    ("array_written_backwards", EXACT): "the loop is named, not the write",
    ("level_by_place", EXACT): "fit is cancelled where examples are numbered",
    ("sum_in_a_mean", DEFAULT): "the line of the sum is not named",
    ("sigmoid_of_all_pairs", DEFAULT): "a unit matrix is named",
    ("sigmoid_of_all_pairs", EXACT): "a unit matrix is named",
    ("teacher_if_it_is_worse", EXACT): _AFTER,
    ("centred_teacher", EXACT): _AFTER,
    ("centre_of_the_teacher", EXACT): _AFTER,
}

# What is equal, and told in vain.
for _name, _reason in {
    "contractive_autoencoder": "batch_jacobian",
    "views_interleaved": "picks of several rows for each example",
    "temporal_classification": _CTC,
    "classification_of_keras": _CTC,
    "hardest_pixels_of_each": "as many as a size that is not known",
    "vectorized_over_examples": "unit matrices for each example",
}.items():
    KNOWN[_name, DEFAULT] = KNOWN[_name, EXACT] = _reason
for _name, _reason in {
    "only_the_diagonal": "the diagonal of all pairs",
    "same_on_both_branches": "branches that are alike",
}.items():
    KNOWN[_name, DEFAULT] = _reason
