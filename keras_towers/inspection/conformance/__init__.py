"""The exactness contract as cases that any strategy can run.

``case_models``
  Small data and models of the cases.
``cases``
  The cases of the exactness contract: a model, its ``fit``, a tolerance.
``outcomes``
  Trains a model on one device and on towers, and compares the results.
``strategy_check``
  Checks that a strategy trains as one device does, case by case.
"""
