"""Same source, same bytes: time and save id that can be made again."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fpformat
from fpformat_io.torch import save
from fpformat_tools.convert import conversion as converting
from fpformat_tools.formats.interface import SaveId
from fpformat_tools.streams.progress import silent

PLAIN = ["out", "--reproducible"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file({f"t{i}": torch.arange(3000.0) + i for i in range(4)}, path, metadata={"run": "x"})
    return path


def files_of(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {each.name: each.read_bytes() for each in path.iterdir()}


def manifest_of(path: Path) -> fpformat.Manifest:
    with fpformat.open_checkpoint(path) as checkpoint:
        return checkpoint.manifest


def test_a_given_time(
    tmp_path: Path, source: Path, convert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "two", "--reproducible")
    assert manifest_of(tmp_path / "one").created_us == 1_700_000_000_000_000
    assert manifest_of(tmp_path / "two").created_us == 1_700_000_000_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    convert(source, tmp_path / "three")
    assert manifest_of(tmp_path / "three").created_us == 0


@pytest.mark.parametrize("text", ["", "now", "-1", "1.5", " 1", "1_0", "9" * 11, "9" * 40, "٣"])
def test_a_wrong_time_is_a_usage_error(
    tmp_path: Path, source: Path, run: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    outcome = run("fpconvert", source, tmp_path / "out")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "SOURCE_DATE_EPOCH is " in outcome.err
    assert sorted(tmp_path.iterdir()) == [source]
    assert run("fpconvert", source, tmp_path / "out.pt").code == 0


@pytest.mark.clause("COM-10")
@pytest.mark.parametrize("target", [PLAIN, ["out.pt"], ["o.safetensors"], ["hub", "--to=torch"]])
def test_the_same_bytes(
    tmp_path: Path, source: Path, convert: Any, run: Any, target: list[str]
) -> None:
    name, *options = target
    outputs = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        convert(source, tmp_path / folder / name, *options)
        outputs.append(files_of(tmp_path / folder / name))
    assert outputs[0] == outputs[1]
    if target is PLAIN:
        assert manifest_of(tmp_path / "one/out").created_us == 0
        assert run("fpverify", tmp_path / "one/out").code == 0
        save_id = manifest_of(tmp_path / "one/out").save_id
        convert(source, tmp_path / "third")
        assert manifest_of(tmp_path / "third").save_id != save_id


def test_ties_and_trees_come_again(tmp_path: Path, convert: Any) -> None:
    weight = torch.arange(600.0).view(30, 20)
    state = {"a": weight, "b": weight, "turned": weight.t()[3:], "lr": 0.5, "żółć": torch.ones(2)}
    save(state, tmp_path / "ckpt", metadata={"z": "1", "a": "2"})
    for name in ("one", "two"):
        convert(tmp_path / "ckpt", tmp_path / name, "--reproducible")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.clause("COM-10")
@pytest.mark.parametrize("change", ["byte", "name", "shape", "metadata", "time"])
def test_other_content_has_another_save_id(
    tmp_path: Path, convert: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    tensors, metadata = {"a": torch.zeros(6)}, {"run": "x"}
    save_file(tensors, tmp_path / "m.safetensors", metadata=metadata)
    convert(tmp_path / "m.safetensors", tmp_path / "one", "--reproducible")
    if change == "byte":
        tensors["a"][5] = 1
    elif change == "name":
        tensors = {"b": tensors["a"]}
    elif change == "shape":
        tensors["a"] = tensors["a"].view(2, 3)
    elif change == "metadata":
        metadata["run"] = "y"
    else:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    save_file(tensors, tmp_path / "m.safetensors", metadata=metadata)
    convert(tmp_path / "m.safetensors", tmp_path / "two", "--reproducible")
    assert manifest_of(tmp_path / "one").save_id != manifest_of(tmp_path / "two").save_id


def _staging(tmp_path: Path, source: Path, convert: Any) -> Path:
    """Return what the staging directory of a reproducible conversion is called."""
    convert(source, tmp_path / "first", "--reproducible")
    return tmp_path / f".fps-{manifest_of(tmp_path / 'first').save_id.hex()}"


@pytest.mark.clause("COM-18")
def test_what_a_killed_conversion_left_is_removed(
    tmp_path: Path, source: Path, convert: Any
) -> None:
    staging = _staging(tmp_path, source, convert)
    staging.mkdir()
    (staging / "seg-000000.fps").write_bytes(b"half")
    (staging / "manifest.json").write_bytes(b"")
    os.utime(staging, (time.time() - 5,) * 2)
    convert(source, tmp_path / "again", "--reproducible")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "first")
    assert not staging.exists()


@pytest.mark.clause("COM-18")
@pytest.mark.parametrize("kind", ["locked", "young"])
def test_what_another_conversion_has_is_left_alone(
    tmp_path: Path, source: Path, convert: Any, refuse: Any, kind: str
) -> None:
    staging = _staging(tmp_path, source, convert)
    staging.mkdir()
    (staging / "seg-000000.fps").write_bytes(b"half")
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    if kind == "locked":
        os.utime(staging, (time.time() - 5,) * 2)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    text = refuse(source, tmp_path / "again", "--reproducible")
    os.close(descriptor)
    assert "another conversion of the same content is writing here" in text
    assert text.count("\n") == 1
    assert (staging / "seg-000000.fps").read_bytes() == b"half"


@pytest.mark.parametrize("kind", ["foreign", "link", "file"])
def test_what_is_no_leftover_is_left_alone(
    tmp_path: Path, source: Path, convert: Any, refuse: Any, kind: str
) -> None:
    staging = _staging(tmp_path, source, convert)
    if kind == "foreign":
        staging.mkdir()
        (staging / "notes.txt").write_text("precious")
        os.utime(staging, (time.time() - 5,) * 2)
    elif kind == "link":
        staging.symlink_to(tmp_path / "first")
    else:
        staging.write_text("precious")
    assert "what cannot be removed" in refuse(source, tmp_path / "again", "--reproducible")
    if kind == "foreign":
        assert (staging / "notes.txt").read_text() == "precious"
    assert (tmp_path / "first" / "manifest.json").exists()


_CONVERT = "import sys; from fpformat_tools.commands.fpconvert import main; sys.exit(main())"
_WAITING = """
import os, sys
from fpformat_tools.commands import fpconvert
from fpformat_tools.formats.fpformat import reproducible
read = reproducible.SteadySource.read
def slow(self, **keywords):
    print("writing", flush=True)
    sys.stdin.readline()
    return read(self, **keywords)
reproducible.SteadySource.read = slow
sys.exit(fpconvert.main())
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_two_at_the_same_time(tmp_path: Path, source: Path, is_killed: bool) -> None:
    """The second fails while the first is writing, and succeeds once the first was killed."""
    arguments = [str(source), str(tmp_path / "one"), "--reproducible", "--quiet"]
    first = subprocess.Popen(
        [sys.executable, "-c", _WAITING, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "writing\n"
    arguments[1] = str(tmp_path / "two")
    second = [sys.executable, "-c", _CONVERT, *arguments]
    ran = subprocess.run(second, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "another conversion of the same content is writing here" in ran.stderr
    assert not (tmp_path / "two").exists()
    if is_killed:
        first.send_signal(signal.SIGKILL)
        (staging,) = tmp_path.glob(".fps-*")
        first.communicate()
        os.utime(staging, (time.time() - 5,) * 2)
        assert subprocess.run(second, check=False).returncode == 0
        assert sorted(each.name for each in tmp_path.iterdir()) == ["m.safetensors", "two"]
        return
    first.communicate("\n" * 20)
    assert first.returncode == 0
    assert subprocess.run(second, check=False).returncode == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_many_at_the_same_time(tmp_path: Path, source: Path) -> None:
    """Whoever gets the directory commits; every other one says why it did not."""
    errors: list[str] = []
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        request = converting.Request(
            source=source, target=tmp_path / f"out{number}", save_id=SaveId.CONTENT
        )
        barrier.wait()
        try:
            converting.convert(request, show_progress=lambda _: _Silence())
        except fpformat.FpformatError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = sorted(tmp_path.glob("out*"))
    assert len(done) + len(errors) == 6
    assert done
    assert all("another conversion of the same content" in text for text in errors)
    assert all(files_of(path) == files_of(done[0]) for path in done)
    assert not list(tmp_path.glob(".fps-*"))


class _Silence:
    def __enter__(self) -> Any:
        return silent

    def __exit__(self, *_: object) -> None:
        """Show nothing."""


@pytest.mark.clause("SUM-7")
def test_a_source_that_changes_between_the_readings(
    tmp_path: Path, source: Path, refuse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(*arguments: Any, **more: Any) -> Any:
        with source.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"\x7f")
        return fpformat.write_checkpoint(*arguments, **more)

    monkeypatch.setattr("fpformat_tools.formats.fpformat.write.write_checkpoint", touch)
    text = refuse(source, tmp_path / "out", "--reproducible")
    assert "changed while it was read" in text
    assert "'t3'" in text
