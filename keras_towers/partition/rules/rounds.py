"""What loops are laid out with, whichever rounds a tower runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf

from keras_towers.partition.layouts import Value, have_same_facts
from keras_towers.partition.nodes import Node
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.reasons import NotDivided
from keras_towers.partition.rules.control_flow import add_call, bind_captures

_K = TypeVar("_K")
_R = TypeVar("_R")
# Enough passes for the layouts of a loop to settle.
_PASSES = 8


def loop_variables(body: tf.Graph) -> list[int]:
    """Return the indices of the inputs that a round may change."""
    return [
        index
        for index, tensor in enumerate(body.outputs)
        if skip_identities(tensor) is not body.inputs[index]
    ]


def skip_identities(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that a chain of identities copies."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def settle(
    variables: Mapping[_K, Value],
    lay_out_round: Callable[
        [Mapping[_K, Value]], tuple[_R, Mapping[_K, Value]]
    ],
) -> tuple[_R, Mapping[_K, Value]]:
    """Find loop variables that are the same before and after a round.

    Args:
        variables: the initial loop variables, by their keys.
        lay_out_round: lays out a round; returns a result, and the loop
            variables joined with those after the round.

    Returns:
        The last result, and the loop variables.

    Raises:
        NotDivided: they do not settle.
    """
    for _ in range(_PASSES):
        result, after = lay_out_round(variables)
        if after.keys() == variables.keys() and all(
            have_same_facts(variables[k], after[k]) for k in variables
        ):
            return result, variables
        variables = after
    raise NotDivided("the layouts in rounds of {} do not settle")


def add_loop(
    node: Node,
    loop_vars: Sequence[Tensor],
    body: Function,
    condition: Function,
) -> list[Tensor]:
    """Add a loop; return its outputs, of which the first are loop variables.

    Args:
        node: the traced loop.
        loop_vars: the N initial loop variables.
        body: takes the loop variables, and returns new ones.
        condition: takes the loop variables; returns whether to continue.
    """
    (body, condition), captures = bind_captures([body, condition])
    body = dataclasses.replace(body, outputs=[*body.outputs, *captures])
    operands = [*loop_vars, *captures]
    return add_call(
        node,
        operands,
        {"T": [tensor.dtype for tensor in operands]},
        [(tensor.dtype, tensor.shape) for tensor in body.inputs],
        {"body": body, "cond": condition},
    )
