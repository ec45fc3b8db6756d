"""The benchmark behind ``keras-towers bench``.

A *row* is one way to train. A *suite* holds the rows that are compared with
each other, where the replicas are towers of one process or processes. A *cell*
is one run of a row on a model with a number of replicas; fresh worker processes
measure it and leave what they measured, from which the results are computed.
"""
