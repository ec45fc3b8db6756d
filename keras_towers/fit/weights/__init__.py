"""The models that live on towers, and where their variables are."""
