"""fpformat: a checkpoint format for training, and its readable reference implementation."""

from fpformat.dtypes import DType
from fpformat.errors import (
    ChecksumError,
    CommitOutcomeUnknownError,
    FormatError,
    FpformatError,
    NotDurableError,
    NotFpformatError,
    PlanError,
    Problem,
    SaveError,
    StorageError,
    TruncatedError,
    UncommittedError,
    UnsupportedError,
)
from fpformat.read.digest import StateDigest, state_digest
from fpformat.read.reader import Checkpoint, open_checkpoint
from fpformat.read.source import BytesSource, FileSource
from fpformat.read.trees import StateTree
from fpformat.read.verify import VerifyReport, verify_checkpoint
from fpformat.records.layout import plan_checkpoint
from fpformat.records.model import (
    Box,
    Geometry,
    Manifest,
    ObjectEntry,
    Part,
    SavePlan,
    SegmentPlan,
    TensorEntry,
    View,
)
from fpformat.write.writer import WriteReport, write_checkpoint

__version__ = "0.1.0"

__all__ = [
    "Box",
    "BytesSource",
    "Checkpoint",
    "ChecksumError",
    "CommitOutcomeUnknownError",
    "DType",
    "FileSource",
    "FormatError",
    "FpformatError",
    "Geometry",
    "Manifest",
    "NotDurableError",
    "NotFpformatError",
    "ObjectEntry",
    "Part",
    "PlanError",
    "Problem",
    "SaveError",
    "SavePlan",
    "SegmentPlan",
    "StateDigest",
    "StateTree",
    "StorageError",
    "TensorEntry",
    "TruncatedError",
    "UncommittedError",
    "UnsupportedError",
    "VerifyReport",
    "View",
    "WriteReport",
    "open_checkpoint",
    "plan_checkpoint",
    "state_digest",
    "verify_checkpoint",
    "write_checkpoint",
]
