"""A timeline of ``fit``: a trace, a table of phases, and a line of advice.

Each rank records its steps (``recording.py``), and the times at which its
towers pass the marks of ``step_clock.py``. At the end of ``fit`` the
recordings of all ranks are put on one clock, and written in the format of
``chrome://tracing`` and ui.perfetto.dev (``trace_file.py``). What a step takes
is in ``phases.py``, and what is said of it in ``advice.py``.

``advice``
  Prints the table of phases, and advice about them.
``callback``
  ``kt.Timeline``: the callback that measures.
``phases``
  The phases of a step, from what the ranks have measured.
``recording``
  The measurements of each rank, on one clock.
``trace_file``
  Writes the trace of all ranks, in the format of tools.
"""
