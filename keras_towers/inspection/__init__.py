"""Looks at a model's training on towers: plans, checks, explains, measures.

``bench`` measures strategies, ``conformance`` has the cases that must train as
on one device, and ``recording`` has ``kt.Timeline``.

``explanation``
  ``kt.explain``: what a step of training does on towers, line by line.
``network_cost``
  A cost model of the network: seconds of a step's exchanges on given links.
``planning``
  Plans the memory and exchanges of a model, by a step that never runs.
``user_models``
  Imports the models that a user names, and makes examples for them.
``verification``
  ``kt.verify``: how far a model's training on towers is from one device.
"""
