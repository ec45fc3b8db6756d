"""A rank that meets the others, is compared and watched, and trains nothing.

Without TensorFlow many of them fit on a machine: ``scaling.py`` starts them.
Each line of stdin is what the rank waits in from then on; empty: nothing.
"""

from __future__ import annotations

import os
import sys
import time

from keras_towers.meeting import check, rendezvous, store, watch


def main() -> None:
    """Take part in a job until stdin is closed, or for some seconds."""
    rendezvous.join()
    check.introduce("")
    rank, size = (int(os.environ[f"HOROVOD_{n}"]) for n in ("RANK", "SIZE"))
    store.tell_connected(rank)
    watch.watch_over(rank, size)
    print("met", rank, flush=True)
    time.sleep(float(*sys.argv[1:] or "0"))
    for line in sys.stdin:
        watch.mark(line.strip())


if __name__ == "__main__":
    main()
