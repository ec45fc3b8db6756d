"""Per-tower batches, and agreement between ranks on their data.

``batches``
  Batches of towers: a global batch split, or one batch for each tower.
``data_use``
  The use of data by a call of Keras, and who has divided the data.
``epoch_iterator``
  Keras's epoch iterator over the batches of towers.
``same_data``
  Checks that all ranks read the same data, by fingerprints of it.
``shared_files``
  Keeps ranks from writing a file of data that another one writes or reads.
``shuffle_order``
  Shuffles data in the same order on all ranks.
``tower_datasets``
  Datasets of batches that are divided over towers before a step.
``model_use``
  Data in Python that use the model that trains on them.
"""
