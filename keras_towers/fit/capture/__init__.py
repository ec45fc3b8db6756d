"""A tower's step up to its optimizer, from the bottom up.

``capture`` runs it, ``function`` calls a traced one, ``checks`` says which may
be cut and shared, ``trace`` is the trace of one tower, and ``sharing``
lets towers call as few of them as possible.
"""
