"""Models placed on towers, and where their variables live."""
