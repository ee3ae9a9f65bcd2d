"""Makes the makers of inputs importable, and gives the commands as functions."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fpformat_tools.commands import fpconvert, fpinspect, fpverify  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: ``run("fpverify", path, "--json")``."""
    mains = {
        "fpconvert": fpconvert.main,
        "fpinspect": fpinspect.main,
        "fpverify": fpverify.main,
    }

    def call(command: str, *arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            code = mains[command]([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert "internal error" not in captured.err
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def convert(run: Run) -> Callable[..., Outcome]:
    """Run fpconvert and expect it to succeed."""

    def call(*arguments: object) -> Outcome:
        outcome = run("fpconvert", *arguments)
        assert outcome.code == 0, outcome.err
        return outcome

    return call


@pytest.fixture
def refuse(run: Run) -> Callable[..., str]:
    """Run fpconvert, expect a refusal that leaves nothing behind, and return the message."""

    def call(source: object, target: Path, *arguments: object) -> str:
        before = sorted(target.parent.iterdir())
        outcome = run("fpconvert", source, target, *arguments)
        assert outcome.code == 1
        assert outcome.out == ""
        assert sorted(target.parent.iterdir()) == before
        return outcome.err

    return call


_ALONE = """
import re, sys
from pathlib import Path
from fpformat_tools.commands import fpconvert
code = fpconvert.main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(peak.group(1))
sys.exit(code)
"""


@pytest.fixture
def run_alone() -> Run:
    """Run fpconvert in a process of its own, which may take neither long nor much memory."""

    def call(*arguments: object, limit_mb: int = 400, seconds: int = 60) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-c", _ALONE, *map(str, arguments)],
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        err = done.stderr.decode()
        assert "Traceback" not in err
        assert "internal error" not in err
        *out, peak = done.stdout.decode().splitlines()
        assert int(peak) < limit_mb * 1000, f"{peak} kB"
        return Outcome(done.returncode, "\n".join(out), err)

    return call
