"""BytePS: its build, its transport, servers, strategy and drop-in."""
