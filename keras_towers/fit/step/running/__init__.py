"""What runs in Python before, between and after the steps of a call."""
