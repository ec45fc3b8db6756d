"""A tower's step up to its optimizer, from the bottom up.

``capture`` runs it, ``function`` calls a traced step, ``checks`` says which
steps may be cut and shared, ``trace`` is the trace of one tower, and
``sharing`` lets towers call as few traces as possible.
"""
