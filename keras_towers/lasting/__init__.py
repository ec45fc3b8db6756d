"""Backups of training, and callbacks that resume ``fit``."""
