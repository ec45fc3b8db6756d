"""What XLA compiles of the steps of a test."""

import pytest

from keras_towers.fit.step.graph.graph_function import CallMode, GraphFunction
from keras_towers.fit.step.graph.tower_program import TowerProgram


@pytest.fixture
def functions(monkeypatch):
    """Notes how many functions XLA compiles, and why it does not."""
    noted = {"compiled": 0, "not": []}
    init, add_to_graph = GraphFunction.__init__, TowerProgram.add_to_graph

    def made(function, graph, mode: CallMode = "called", has_shapes=False):
        init(function, graph, mode, has_shapes)
        noted["compiled"] += mode == "xla"

    def add(program, *args):
        results = add_to_graph(program, *args)
        noted["not"] += program.xla.not_compiled
        return results

    monkeypatch.setattr(GraphFunction, "__init__", made)
    monkeypatch.setattr(TowerProgram, "add_to_graph", add)
    return noted
