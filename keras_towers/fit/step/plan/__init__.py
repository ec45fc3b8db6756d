"""Finds a plan of a step that fits into the memory of its devices.

``device_memory``
  Makes models fit into the memory of their devices, or refuses them.
``dry_run``
  Dry runs: steps that are laid out, and their memory, but that never run.
``memory_limit``
  The smallest memory of the devices that train a model.
``memory_messages``
  What users are told of memory: how a step fits, or why it does not.
``plan_search``
  The search for the cheapest plan of a step that fits into memory.
"""
