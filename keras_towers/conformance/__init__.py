"""The exactness contract as cases that any strategy can run.

``case_models``
  Small data and models of the cases.
``cases``
  The cases of the exactness contract: a model, its ``fit``, a tolerance.
``outcomes``
  Uses a model on one device or on towers, and compares what came of it.
``strategy_check``
  Checks that a strategy trains as one device does, case by case.
"""
