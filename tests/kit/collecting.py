"""Python's garbage collector, for processes that trace a lot."""

import gc


def collect_rarely() -> None:
    """Search less often for garbage; to be called after the imports.

    Tracing makes many objects that live on, and by default each few hundred of
    them are searched. Modules that are imported for good need not be at all.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 5)


def search_no_more() -> None:
    """Collect garbage, and leave what remains out of later searches.

    To be called between tests: caches keep much of what they trace, and each
    ``clear_session`` begins with a search of all there is.
    """
    gc.collect()
    gc.freeze()
