"""Safetensors as an input and as an output: one file, or a directory with an index."""
