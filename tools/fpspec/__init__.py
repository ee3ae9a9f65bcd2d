"""Keeps the specification, its lock, the code and the tests together; for contributors."""
