"""The engines that connect the processes of a job, a folder for each.

The rest of the package knows an engine by its strategy's ``Transport`` and by
its record in ``known_engines``. Outside, only the table of the package's public
names has modules of these folders.
"""
