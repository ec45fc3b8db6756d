"""Random draws that XLA compiles, in functions that it does not.

XLA draws other numbers than TensorFlow. Results must not depend on whether the
surrounding function is compiled. So a draw in such a function becomes a call of
a function that XLA compiles.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from keras_towers.foundation import compat
from keras_towers.partition.ir.effects import called_names, is_draw
from keras_towers.partition.xla.kernels import Kernels, rename_calls

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef

# The attribute of calls that XLA compiles.
COMPILED = "_XlaMustCompile"
_numbers = itertools.count()


class CompiledDraws:
    """Rewrites functions, so that XLA compiles their random draws.

    Args:
        graph: the graph that calls the functions.
        kernels: what XLA compiles.
    """

    def __init__(self, graph: tf.Graph, kernels: Kernels):
        self._graph = graph
        self._kernels = kernels
        self._names: dict[str, str] = {}

    def rename(self, name: str) -> str:
        """Return the name of an equal function with compiled draws.

        A function that draws nothing keeps its name.
        """
        if name not in self._names:
            # It may call itself.
            self._names[name] = name
            self._names[name] = self._rewritten(name)
        return self._names[name]

    def _rewritten(self, name: str) -> str:
        traced = compat.definition_of_function([self._graph], name)
        if traced is None:
            return name
        definition = type(traced)()
        definition.CopyFrom(traced)
        has_changed = False
        outputs: dict[str, str] = {}
        for node in list(definition.node_def):
            if COMPILED in node.attr and node.attr[COMPILED].b:
                continue
            has_kernel = self._kernels.has_kernel(node.op, node.attr)
            if is_draw(node.op) and has_kernel:
                outputs |= self._compile(definition, node)
                has_changed = True
                continue
            before = called_names(node.attr)
            rename_calls(node.attr, self.rename)
            has_changed |= before != called_names(node.attr)
        if not has_changed:
            return name
        for node in definition.node_def:
            for index, source in enumerate(node.input):
                node.input[index] = outputs.get(source, source)
        for key, source in definition.ret.items():
            definition.ret[key] = outputs.get(source, source)
        return self._add(definition, name)

    def _compile(
        self, definition: FunctionDef, node: NodeDef
    ) -> dict[str, str]:
        """Replace a draw by a call of a compiled function.

        Returns the new names of its outputs.
        """
        draw = type(definition)()
        arguments = compat.op_definition(node.op)
        for signature, args in (
            (draw.signature.input_arg, arguments.input_arg),
            (draw.signature.output_arg, arguments.output_arg),
        ):
            for arg in args:
                dtype = arg.type or node.attr[arg.type_attr].type
                signature.add(name=arg.name, type=dtype)
        inside = draw.node_def.add()
        inside.CopyFrom(node)
        inside.name = "draw"
        del inside.input[:]
        inside.input.extend(arg.name for arg in arguments.input_arg)
        for arg in arguments.output_arg:
            draw.ret[arg.name] = f"draw:{arg.name}:0"
        draw.attr[COMPILED].b = True
        # TensorFlow would compute a call with constants, if it had no effects,
        # before the step, and without XLA.
        node.op = "StatefulPartitionedCall"
        for key in [*node.attr]:
            if not key.startswith("_"):
                del node.attr[key]
        for key, args in (
            ("Tin", draw.signature.input_arg),
            ("Tout", draw.signature.output_arg),
        ):
            node.attr[key].list.type.extend(arg.type for arg in args)
        node.attr[COMPILED].b = True
        node.attr["f"].func.name = self._add(draw, node.name)
        return {
            f"{node.name}:{arg.name}:0": f"{node.name}:output:{index}"
            for index, arg in enumerate(arguments.output_arg)
        }

    def _add(self, definition: FunctionDef, like: str) -> str:
        """Add a function to the graph; return its name."""
        original = like.rpartition("/")[2]
        name = f"{original}_with_compiled_draws_{next(_numbers)}"
        definition.signature.name = name
        function = compat.function_of_definition(definition)
        compat.add_functions(self._graph, [function])
        return name
