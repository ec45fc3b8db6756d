"""What makes training last: its place is kept, and ``fit`` goes on from it."""
