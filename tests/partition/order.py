"""Whether a timeline computes everything before it is used."""

from keras_towers.partition.ir.program import (
    Exchange,
    Phase,
    is_repeated,
    unrepeated,
)


def check_order(timeline):
    """Check that every event follows what it uses, and what it waits for."""
    program = timeline.program
    order = {event: index for index, event in enumerate(program.events)}
    makers = {tensor: event for event in order for tensor in event.made}

    def time_of(event):
        is_exchange = isinstance(event, Exchange)
        phase = len(Phase) if is_exchange else event.phase
        return timeline.levels[event], phase

    def end_of(event):
        """Return the time from which on others may use an event's results."""
        level, phase = time_of(event)
        return (level + 1, 0) if isinstance(event, Exchange) else (level, phase)

    for event in order:
        used = [makers[t] for t in event.used if t in makers]
        missing = [t for t in event.used if t.operation and t not in makers]
        late = [other for other in used if order[other] >= order[event]]
        assert not missing and not late, (event, missing, late)
        if is_repeated(event):
            continue
        # What is repeated for it is at the same time.
        used = [makers[t] for t in unrepeated(event.used) if t in makers]
        used += program.before.get(event, ())
        waits = timeline.waits.get(event, ())
        late = [
            other
            for other in (*used, *waits)
            if not is_repeated(other)
            and (order[other] >= order[event] or end_of(other) > time_of(event))
        ]
        assert not late, (event, late)
