"""``keras-towers bench --field``: the frameworks on the same model and data.

Each row trains from the weights that the reference started from, on the same
batches in the same order. A row counts only if its losses are the reference's.
"""
