"""Whether the graphs that steps are built of are freed."""

import contextlib
import gc

from keras_towers.foundation import compat


@contextlib.contextmanager
def assert_freed():
    """At the end of the block, also if the collector does not run by itself."""
    gc.collect()
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
        graphs = [
            each
            for each in gc.get_objects()
            if issubclass(type(each), compat.FuncGraph)
        ]
        names = {graph.name for graph in graphs}
        # The step of Keras stays, with calls of what towers compute.
        assert any(name.startswith("one_step_on_data") for name in names)
        assert names.isdisjoint({"one_device", "towers", "column"}), names
    finally:
        gc.set_threshold(*thresholds)
