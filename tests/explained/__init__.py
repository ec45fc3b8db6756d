"""Ten small steps, and what ``kt.explain`` says of them, in ``*.txt``.

``python -m tests.explained`` writes these files.
"""
