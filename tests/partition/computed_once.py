"""What each step computes once for all towers, although it has rows.

Types of operations, with their number if it is not one. All other steps divide
everything. Whoever adds a rule takes out what it divides. What comes to be
computed once makes a step slower: look for the rule that is gone before you
write it down here.
"""

import collections

ONCE = {
    # tests/partition/cases
    "action_of_the_first": "2 MatMul, StridedSlice, TanhGrad",
    "additive_angular_margin": "Mul, Reshape",
    "all_but_the_last": "2 MatMul, 2 StridedSlice, TanhGrad",
    "array_written_backwards": "AddV2, StatelessWhile, Sub",
    "array_written_forwards": "AddV2, StatelessWhile, Sub",
    "atrous_by_space_to_batch": "Conv2DBackpropFilter, SpaceToBatchND, Sub",
    "attention_over_the_batch": "AddN",
    "best_example": "ArgMin, GatherV2",
    "by_numpy": "PyFunc",
    "centred_and_recomputed": "StridedSlice",
    "circle_of_keras": "AddV2, LogicalAnd, MatrixSetDiagV3, 3 Mul",
    "classification_of_keras": (
        "2 AddV2, MatMul, Mul, StatelessWhile, Sub, 3 TensorScatterAdd, 2 While"
    ),
    "confusion": "4 If",
    "contrastive": "2 Mul",
    "convolved_over_examples": "Conv2D, 2 MatMul, Sub, TanhGrad",
    "counted_by_loop": "While",
    "cropped_by_boxes": (
        "Conv2DBackpropFilter, CropAndResize, CropAndResizeGradImage, Sub"
    ),
    "cut_out_of_the_first": "AddN, CropAndResize, 2 MatMul, TanhGrad",
    "dense_and_flat": "AddV2, RaggedTensorToTensor, Sub",
    "every_pair_once": "2 GatherV2",
    "examples_in_a_table": "LookupTableInsertV2",
    "first_half_labelled": "2 MatMul, 3 StridedSlice, TanhGrad",
    "folded_and_decayed": "StatelessWhile",
    "gradient_clipped_by_example_twice": "Reshape, 2 Transpose",
    "hardest_pixels": "TopKV2",
    "indices_rolled": "Roll",
    "kernels_of_each_example": (
        "AddN, Conv2DBackpropFilter, DepthwiseConv2dNative, "
        "DepthwiseConv2dNativeBackpropFilter, "
        "DepthwiseConv2dNativeBackpropInput, Sub"
    ),
    "last_example_is_kept": "StridedSlice",
    "lists_looked_up": "AddV2, LookupTableFindV2, Sub",
    "loop_until_all_are_done": "StatelessWhile, Sub",
    "mean_of_integers": "Mean",
    "memory_bank": "ConcatV2",
    "mixed_up": "AddV2, Mul, ReverseV2, Sub",
    "mixup_of_the_step": "2 StatelessRandomGammaV3, TopKV2",
    "normalized_by_ghosts": "MatMul, 2 StridedSlice, Sub",
    "only_the_diagonal": "MatMul, MatrixDiagPartV3, MatrixSetDiagV3, 2 Mul",
    "padding_ignored_by_keras": "Reshape, SelectV2",
    "parity_of_the_batch": "Pad",
    "patches_out_of_order": "2 Reshape",
    "product_of_all": "2 Cumprod",
    "quantile_of_keras": "TopKV2",
    "quantized_by_constants": (
        "FakeQuantWithMinMaxArgs, FakeQuantWithMinMaxArgsGradient, 2 "
        "MatMul, Sub, TanhGrad"
    ),
    "ragged_words_alike": "SegmentSum, Sub",
    "readout_by_graph": "SegmentMean, SegmentSum, Sub",
    "recomputed": "StridedSlice",
    "repeated_and_averaged": "Reshape",
    "reverse_sequence_of_examples": "2 MatMul, ReverseSequence, Sub, TanhGrad",
    "shuffled_targets": "RandomShuffle, Sub",
    "softmax_over_batch": "2 MatMul, 2 Mul, Softmax, TanhGrad",
    "sums_by_repeated_numbers": "Reshape, UnsortedSegmentSum",
    "table_of_the_examples": "TensorScatterUpdate",
    "tiled_and_averaged": "Tile",
    "time_taken_for_the_batch": "Sub, While",
    "value_of_another": "2 MatMul, TanhGrad",
    "views_interleaved": "2 MatMul, 2 StridedSlice, Sub, TanhGrad",
    "views_that_are_mixed_up": "2 MatMul, 2 StridedSlice, TanhGrad",
    "weights_of_examples_by_loss": "Mul, Softmax",
    "whitened": "MatrixTriangularSolve, Sub",
    # tests/partition/hostile
    "all_triplets": "2 LogicalAnd, MatrixDiagV3, SelectV2, Sum",
    "bag_of_ragged_words": "Cumsum, Sub, 2 UnsortedSegmentSum",
    "beam_search": "EditDistance, Mul, StatelessWhile",
    "branch_by_the_loss": "AddN, If, 2 MatMul, TanhGrad",
    "by_example": "Reshape, 2 Transpose",
    "centre_loss": "RealDiv, 4 ResourceScatterAdd, UniqueWithCounts",
    "clip": "MatrixDiagV3, 2 Mul, 2 SoftmaxCrossEntropyWithLogits",
    "concordance_and_wasserstein": "ScatterNd, 2 TopKV2",
    "conditional_random_field": (
        "AddV2, MatMul, 2 Mul, ResourceGatherNd, ScatterNd, While"
    ),
    "counted_by_numpy": "PyFunc",
    "cox": (
        "2 AddV2, CumulativeLogsumexp, 2 MatMul, 2 Mul, Sub, TanhGrad, TopKV2"
    ),
    "ctc": "2 AddV2, MatMul, Mul, Sub, 3 TensorScatterAdd, 2 While",
    "cut_to_the_longest": "4 Reshape, 9 Sum",
    "determinantal": "AddV2, 3 MatMul, MatrixDiagV3, Qr, 2 Svd, TanhGrad",
    "double_dqn": "AddV2, 2 StridedSlice, Sub",
    "experts_with_capacity": "AddN, Cumsum, Einsum, MatMul, 5 Mul, Sub",
    "hardest_negatives": "TopKV2",
    "histograms_and_bins": "HistogramFixedWidth, LowerBound",
    "learned_by_an_inner_step": "6 StridedSlice",
    "looked_up_by_layers": "StringSplitV2, Sub",
    "mean_teacher_with_pseudo_labels": "2 StridedSlice",
    "mixup_by_hand": "2 AddV2, 2 GatherV2, 2 Mul",
    "moco": "ConcatV2",
    "moco_by_a_pointer": "TensorScatterUpdate",
    "nearest_neighbours": "AddN, 2 MatMul, 4 Mul",
    "optimal_transport": "AddV2, Mul, ReverseV2, StatelessWhile",
    "ordered_logits": (
        "AddN, 2 MatMul, Pad, 3 Reshape, Roll, StridedSlice, 2 Sub, TanhGrad"
    ),
    "pairs_above_the_diagonal": "MatrixDiagV3, 2 Reshape",
    "pairs_by_where": "2 ConcatV2",
    "ppo": "AddN, Cumsum, 2 MatMul, 2 Mul, 2 Sub, TanhGrad",
    "recurrent_with_state": "12 AssignVariableOp, StatelessWhile",
    "regions": "CropAndResize, CropAndResizeGradBoxes",
    "replay_buffer": "4 ResourceScatterUpdate",
    "segmentation_of_keras": "Mul, Reshape, 3 SelectV2",
    "segments_of_the_batch": (
        "RaggedTensorToTensor, SegmentMean, TopKV2, Unique, UnsortedSegmentMax"
    ),
    "set_prediction": "GatherV2, Mul, PyFunc, Sub",
    "simclr": "MatrixDiagV3, Sub",
    "skip_grams": "AddV2, ComputeAccidentalHits, 3 ConcatV2, Pad",
    "soft_dual_encoder": "2 Mul, 5 Reshape, 2 SoftmaxCrossEntropyWithLogits",
    "spectral_losses": "AddN, FFT, 2 MatMul, TanhGrad",
    "statistics_of_many_batches": "TopKV2",
    "supervised_contrastive": "MatrixDiagV3, 2 Mul, Sub",
    "trimmed_by_a_median": "2 TopKV2",
    "written_by_keras_operations": "ConcatV2, StatelessWhile, Sub",
    "written_for_autograph": "Equal, Mul, StatelessIf, StatelessWhile",
    # Groups of Keras's classes, by their first
    "BinaryCrossentropy sum_over_batch_size": "MatMul, 2 Reshape",
    "BinaryFocalCrossentropy sum_over_batch_size": (
        "4 AddV2, MatMul, 6 Mul, 2 Sub, 6 TensorScatterAdd, 4 While"
    ),
    "CTC sum": "16 AddV2, MatMul, 24 Mul, 8 Sub, 24 TensorScatterAdd, 16 While",
    "CategoricalCrossentropy sum": "AddN, MatMul, 8 Reshape",
    "ContrastLimitedAdaptiveHistogramEqualization": (
        "AddN, MatMul, SigmoidGrad, 4 StatelessRandomGammaV3, 3 "
        "StridedSlice, 2 TopKV2"
    ),
    "Embedding": "ConcatV2, SparseCross, Sub",
    "RandomZoom": "ConcatV2, 2 LookupTableFindV2, StringSplitV2, Sub",
    "SparseCategoricalCrossentropy None": (
        "11 AddV2, 10 LogicalAnd, 10 MatrixSetDiagV3, 40 Mul"
    ),
}


def computed_once(programs):
    """Say what the first program of a test computes once."""
    first, *_ = programs
    counts = collections.Counter(operation.type for operation in first.once)
    return ", ".join(
        type_ if number == 1 else f"{number} {type_}"
        for type_, number in sorted(counts.items())
    )
