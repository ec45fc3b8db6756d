"""Jobs of several processes: how they start, meet, watch one another and end.

``launching`` starts and ends processes; in ``rendezvous`` ranks find, watch and
compare one another; ``building`` builds the engines that ``known_engines``
lists. ``agent`` starts and ends one process on its host.
"""
