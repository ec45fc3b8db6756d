"""The state of a running call, thread by thread, and temporary patches."""
