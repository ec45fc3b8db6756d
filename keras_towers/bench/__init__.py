"""The benchmark behind ``keras-towers bench``.

A *row* is one way to train. A *suite* is a set of rows that are compared with
each other; its replicas are either towers of one process or processes. A *cell*
is one run of a row on a model with a number of replicas. Fresh worker processes
measure it and write their measurements, from which the results are computed. In
``field`` the rows are those of several frameworks on the same weights and data.
"""
