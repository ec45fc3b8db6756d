"""What the cases found and what is not mended yet."""

from __future__ import annotations

DEFAULT, EXACT = "default", "exact"

_UNBUILT = "layers that only the step builds are not exchanged for"
_AFTER = "what uses variables after their update is told without a line"
_JACOBIAN = "gradients of each example are named, not their mean"
_NUMBERS = "numbers of examples that only say where they are"
_ENTRIES = "sizes that follow from sparse or ragged rows are taken for alike"
_COLUMNS = "sums of sparse columns are taken for alike"
_ROWS = "sizes of ragged rows"
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
    ("experts_of_equal_load", EXACT): _UNBUILT,
    ("sparse_softmax_of_all", DEFAULT): _ENTRIES,
    ("sparse_softmax_of_all", EXACT): _ENTRIES,
    ("ragged_to_the_longest", DEFAULT): _ENTRIES,
    ("ragged_to_the_longest", EXACT): _ENTRIES,
    ("sums_of_sparse_columns", DEFAULT): _COLUMNS,
    ("sums_of_sparse_columns", EXACT): _COLUMNS,
    ("level_by_place", EXACT): "fit is cancelled where examples are numbered",
    ("gradient_clipped_by_example_twice", DEFAULT): _JACOBIAN,
    ("gradient_clipped_by_example_twice", EXACT): _JACOBIAN,
    ("added_sum", DEFAULT): "the line of the sum is not named",
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
    "sampled_by_coordinates": _NUMBERS,
    "cropped_by_boxes": _NUMBERS,
    "experts_by_stitching": _NUMBERS,
    "kernels_of_each_example": "examples as channels",
    "logged_means": "how many a boolean mask leaves",
    "sparse_product_of_rows": "the sizes of sparse rows",
    "sparse_attention_over_features": "the gradient of a sort",
    "spectrogram": "the gradient of frames",
    "loss_on_spectra": "the gradient of frames",
    "sums_by_repeated_numbers": _NUMBERS,
    "mean_of_each_ragged_row": _ROWS,
    "multiplied_by_its_length": _ROWS,
    "mean_of_rows_with_short_splits": "row splits of 32 bits are refused",
    "how_many_of_each_word": "a length that the largest value does not change",
    "dense_of_sparse": "the width of sparse rows is lost",
    "array_written_forwards": "loops over examples",
    "messages_by_segments": "places where something is true",
    "readout_by_graph": _NUMBERS,
    "ragged_to_dense": _ROWS,
    "hardest_pixels_of_each": "as many as a size that is not known",
    "vectorized_over_examples": "unit matrices for each example",
}.items():
    KNOWN[_name, DEFAULT] = KNOWN[_name, EXACT] = _reason
for _name, _reason in {
    "only_the_diagonal": "the diagonal of all pairs",
    "same_on_both_branches": "branches that are alike",
}.items():
    KNOWN[_name, DEFAULT] = _reason
