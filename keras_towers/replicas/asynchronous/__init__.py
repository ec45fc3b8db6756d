"""Calls and updates of asynchronous towers."""
