"""Calls and updates of towers that wait for nobody."""
