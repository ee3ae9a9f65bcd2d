"""Without numba everything works, and with it only a save imports it.

Each test runs in an interpreter of its own, in one half of them with numba and llvmlite hidden
from the import system, as where they were never installed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Python imports this module at its start when it finds it.
HIDE = """
import sys

class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {"numba", "llvmlite"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
"""
STATE = """
import logging, sys, torch
logging.basicConfig(format="%(message)s", stream=sys.stdout)
state = {"w": torch.arange(60_000.0).reshape(200, 300).t(), "half": torch.ones(5).bfloat16()}
zeros = {"w": torch.zeros(300, 200), "half": torch.zeros(5, dtype=torch.bfloat16)}
def check(found):
    assert set(found) == set(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())
"""
SAVE = """
from fpformat_io.torch import save
for name in ("one", "two"):
    report = save(state, f"{sys.argv[1]}/{name}")
print(report.mode)
"""
RUN = """
from fpformat_io.torch import Checkpointer
with Checkpointer(f"{sys.argv[1]}/run") as checkpointer:
    for step in (1, 2):
        print(checkpointer.save(step, state).wait_durable().mode)
"""
# Each reads what SAVE or RUN wrote.
READS = {
    "load": "from fpformat_io.torch import load\ncheck(load(f'{sys.argv[1]}/one'))",
    "load_into": "from fpformat_io.torch import load_into\n"
    "load_into(f'{sys.argv[1]}/one', zeros)\ncheck(zeros)",
    "latest": "from fpformat_io.torch import latest\n"
    "assert latest(f'{sys.argv[1]}/run', verify='full').step == 2",
    "checkpointer": "from fpformat_io.torch import Checkpointer\n"
    "with Checkpointer(f'{sys.argv[1]}/run') as checkpointer:\n"
    "    assert checkpointer.latest().step == 2",
}
COMMANDS = {
    "fpverify": ["one", "run/step-0000000002"],
    "fpinspect": ["one"],
    "fpconvert to safetensors": ["one", "out.safetensors"],
    "fpconvert to torch": ["one", "out.pt"],
    "fpconvert from safetensors": ["one.safetensors", "out"],
    "fpconvert from torch": ["one.pt", "out"],
}
COMPILER = """
heavy = ("numba", "llvmlite", "fpformat_io.native", "fpformat_io.write")
print(*sorted(name for name in sys.modules if name.startswith(heavy)))
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """The environment of an interpreter without numba."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": str(folder)}


def run_python(*arguments, **environment):
    """Run a fresh interpreter from the folder of the project; return its lines."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with checkpoints and files, written by an interpreter that has numba."""
    folder = tmp_path_factory.mktemp("written")
    files = """
from safetensors.torch import save_file
torch.save(state, f"{sys.argv[1]}/one.pt")
save_file({name: value.contiguous() for name, value in state.items()},
          f"{sys.argv[1]}/one.safetensors")
"""
    run_python("-c", STATE + SAVE + RUN + files, folder)
    return folder


def test_numba_is_hidden(hidden):
    """What the other tests rest on."""
    code = "try: import {0}\nexcept ModuleNotFoundError as error: print(error.name)"
    for name in ("numba", "llvmlite"):
        assert run_python("-c", code.format(name), **hidden) == [name]


@pytest.mark.parametrize("saves", [SAVE, RUN], ids=["save", "checkpointer"])
def test_saves_without_numba_warn_once_and_say_what_to_install(saves, hidden, tmp_path):
    warning, *modes = run_python("-c", STATE + saves, tmp_path, **hidden)
    assert "numba is not installed" in warning
    assert "fpformat[engine]" in warning
    assert "the plain writer" in warning.lower()
    assert set(modes) == {"buffered"}
    if saves is SAVE:
        assert run_python("-c", STATE + READS["load"], tmp_path) == []


@pytest.mark.parametrize("read", READS)
def test_reading_without_numba(read, hidden, written):
    assert run_python("-c", STATE + READS[read], written, **hidden) == []


@pytest.mark.parametrize("read", READS)
def test_reading_leaves_numba_alone(read, written):
    """Importing it costs more than many loads, and it may be there and broken."""
    assert run_python("-c", STATE + READS[read] + COMPILER, written) == [""]


def arguments_of(command, written, tmp_path):
    """Return the name of a command and its arguments; what it writes goes to `tmp_path`."""
    places = [
        tmp_path / name if name.startswith("out") else written / name for name in COMMANDS[command]
    ]
    return command.split()[0], places


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_without_numba(command, hidden, written, tmp_path):
    name, places = arguments_of(command, written, tmp_path)
    run_python("-m", f"fpformat_tools.commands.{name}", *places, **hidden)
    assert all(place.exists() for place in places)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_leave_numba_alone(command, written, tmp_path):
    name, places = arguments_of(command, written, tmp_path)
    door = f"from fpformat_tools.commands.{name} import main"
    code = f"import sys\n{door}\nassert not main(sys.argv[1:])\n"
    assert run_python("-c", code + COMPILER, *places)[-1] == ""
