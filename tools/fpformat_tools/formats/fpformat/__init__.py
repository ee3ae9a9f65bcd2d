"""Checkpoints of fpformat as an input and as an output."""
