"""Backups of training, and ``kt.elastic``, which resumes from them.

``backup``
  ``kt.Backup``: training that resumes where an earlier run stopped.
``backup_choice``
  Chooses the backup to resume from: the last one that all ranks can read.
``backup_folder``
  The folder of a call's backups: written atomically, and pruned.
``elastic``
  Training that continues when processes are lost, and hosts come or go.
``saved_state``
  The position of ``fit`` in a backup, and how a model gets its state back.
``saved_training``
  The state of training in a backup: the position of ``fit`` and the model.
"""
