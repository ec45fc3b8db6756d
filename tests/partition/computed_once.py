"""Operations on rows that a step computes once for all towers.

Types of operations, with their number if it is not one. All other steps divide
everything. Whoever adds a rule takes out what it divides. What comes to be
computed once makes a step slower: look for the rule that is gone before you
write it down here.
"""

import collections

ONCE = {
    # tests/partition/cases
    "examples_in_a_table": "LookupTableInsertV2",
    "private_by_jacobian": "2 Transpose",
    "table_of_the_examples": "TensorScatterUpdate",
    "bank_whose_rows_grow": "ConcatV2",
    "gradient_of_a_python_function": "EagerPyFunc, 2 MatMul, Sub, TanhGrad",
    "replayed_by_a_queue": "QueueEnqueueManyV2",
    "scaled_by_the_first_batch": "If",
    "steps_until_the_loss_is_small": "While",
    "branch_by_the_loss": "AddN, If, 2 MatMul, TanhGrad",
    "conditional_random_field": (
        "AddV2, MatMul, 2 Mul, ResourceGatherNd, ScatterNd, While"
    ),
    "counted_by_numpy": "PyFunc",
    "counted_words_of_texts": "Unique",
    "pairs_in_a_table": "LookupTableFindV2, Mul, Sub",
    "parts_of_a_tensorflow_variable": "StridedSlice",
    "learned_by_an_inner_step": "6 StridedSlice",
    "regions": "CropAndResize, CropAndResizeGradBoxes",
    "written_by_keras_operations": "ConcatV2, Slice, StatelessWhile",
    "written_for_autograph": "Equal, Mul, StatelessIf, StatelessWhile",
    # Groups of Keras's classes, by their first.
    "BinaryFocalCrossentropy sum_over_batch_size": (
        "4 AddV2, MatMul, 6 Mul, 2 Sub, 6 TensorScatterAdd, 4 While"
    ),
    "CTC sum": "16 AddV2, MatMul, 24 Mul, 8 Sub, 24 TensorScatterAdd, 16 While",
    "ContrastLimitedAdaptiveHistogramEqualization": (
        "4 StatelessRandomGammaV3, 3 StridedSlice, 2 TopKV2"
    ),
}


def computed_once(programs):
    """Say what the first program of a test computes once."""
    first, *_ = programs
    counts = collections.Counter(
        operation.type for operation in first.computed_once
    )
    return ", ".join(
        type_ if number == 1 else f"{number} {type_}"
        for type_, number in sorted(counts.items())
    )
