"""One process that measures one row of the field."""

from benchmarks.rows import FIELD
from keras_towers.bench.worker import main

if __name__ == "__main__":
    main(FIELD)
