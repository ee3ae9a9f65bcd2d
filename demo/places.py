"""Where the demonstration keeps its files."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Places:
    """Paths below one working directory, and the model's data files."""

    work: Path
    model: Path

    @property
    def original(self) -> Path:
        """The model as it was published, in safetensors."""
        return self.model / "model.safetensors"

    @property
    def base(self) -> Path:
        """The same model as a checkpoint of fpformat."""
        return self.work / "base"

    @property
    def exported(self) -> Path:
        """The fine-tuned model, back in safetensors."""
        return self.work / "tuned.safetensors"

    def root(self, name: str) -> Path:
        """Return the directory that holds the checkpoints of one run."""
        return self.work / name

    def log(self, name: str) -> Path:
        """Return the file of losses of one run."""
        return self.work / f"{name}.jsonl"
