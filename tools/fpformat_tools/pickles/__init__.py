"""Pickles, read without executing or importing anything."""
