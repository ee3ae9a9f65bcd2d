"""Saving and loading of checkpoints for frameworks; `fpformat_io.torch` is the face for torch.

Only the package `fpformat_io.torch` imports torch.
"""
