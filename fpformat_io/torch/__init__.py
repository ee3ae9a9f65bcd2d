"""Checkpoints of torch programs: save, load, resume.

Nothing is pickled and nothing imported by name: what has no representation in the format is
refused before the first byte is written.
"""

from fpformat_io.session.latest import LatestCheckpoint, latest
from fpformat_io.session.saves import SaveHandle, SaveReport
from fpformat_io.torch.api import load, save
from fpformat_io.torch.checkpointer import Checkpointer
from fpformat_io.torch.fill import LoadReport, load_into
from fpformat_io.torch.subclasses import register_subclass

__all__ = [
    "Checkpointer",
    "LatestCheckpoint",
    "LoadReport",
    "SaveHandle",
    "SaveReport",
    "latest",
    "load",
    "load_into",
    "register_subclass",
    "save",
]
