"""Saves in the background: when the source is free, what errors do, which checkpoints stay."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch_states import differences

from fpformat.errors import PlanError
from fpformat_io.errors import EngineError, StagingError, WriteError
from fpformat_io.torch import Checkpointer, latest, load, save
from fpformat_io.torch import write as write_module

SAVE_AND_LEAVE = """
import sys, torch
from fpformat_io.torch import Checkpointer
ckpt = Checkpointer(sys.argv[1])
ckpt.save(1, {"w": torch.ones(1_000_000)})
handle = ckpt.save(2, {"w": torch.full((1_000_000,), 2.0)})
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


def names(root):
    return sorted(path.name for path in root.iterdir())


def steps(root):
    return [int(name.removeprefix("step-")) for name in names(root) if name.startswith("step-")]


@pytest.fixture
def gate(monkeypatch):
    """Hold every write back until the gate is opened."""
    opened = threading.Event()
    write = write_module.write_checkpoint

    def wait(*args, **more):
        assert opened.wait(60)
        return write(*args, **more)

    monkeypatch.setattr(write_module, "write_checkpoint", wait)
    yield opened
    opened.set()


@pytest.fixture
def broken(monkeypatch):
    """Make every sync fail as on a full disk."""

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    return monkeypatch


def test_a_save_and_its_report(tmp_path):
    state = {"w": torch.arange(1000.0), "again": None}
    state["again"] = state["w"]
    with Checkpointer(tmp_path / "runs" / "one") as ckpt:
        handle = ckpt.save(5, state, metadata={"loss": "0.5"})
        handle.wait_staged()
        report = handle.wait_durable(60)
        assert handle.done
        assert ckpt.latest().path == report.path
    assert report.path == tmp_path / "runs" / "one" / "step-0000000005"
    assert report.tensor_count == 2
    assert 4000 < report.data_nbytes < report.nbytes
    assert 0 < report.stall_seconds <= report.seconds
    found = latest(tmp_path / "runs" / "one")
    assert (found.step, found.checkpoint_id, found.skipped) == (5, report.checkpoint_id, ())
    assert not differences(load(found), state)


def test_the_state_may_change_at_once(tmp_path, gate):
    state = {f"p{place}": torch.full((4096,), 1.0) for place in range(8)}
    state |= {"column": torch.ones(64, 64)[:, 3], "step": torch.tensor(1.0), "iter": 1}
    state |= {"history": [1, 1], "array": torch.ones(5).numpy(), "bytes": bytes(4)}
    expected = {name: getattr(value, "clone", lambda v=value: v)() for name, value in state.items()}
    expected |= {"history": [1, 1], "array": state["array"].copy()}
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, state)
        handle.wait_staged(0)
        for value in list(state.values()):
            if isinstance(value, torch.Tensor):
                value.add_(1.0)
        state["array"] += 1
        state["p1"].untyped_storage().resize_(0)
        state["history"].append(2)
        state["new"] = torch.zeros(1)
        del state["p0"]
        assert not handle.done
        with pytest.raises(TimeoutError):
            handle.wait_durable(0.01)
        gate.set()
        path = handle.wait_durable(60).path
    assert not differences(expected, load(path))


def test_the_copies_are_freed_when_a_save_is_durable(tmp_path, monkeypatch):
    kept = []
    write = write_module.write_checkpoint

    def watch(path, plan, sources, **more):
        kept.extend(weakref.ref(source) for source in sources.values())
        return write(path, plan, sources, **more)

    monkeypatch.setattr(write_module, "write_checkpoint", watch)
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, {"w": torch.ones(10)})
        handle.wait_durable(60)
        ckpt.save(2, {}).wait_durable(60)
        gc.collect()
        assert kept
        assert [ref() for ref in kept] == [None]


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    with Checkpointer(tmp_path) as ckpt:
        first = ckpt.save(1, {"x": 1})
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        second = ckpt.save(2, {"x": 2})
        assert first.done
        assert second.wait_durable(60).stall_seconds >= 0.04
        timer.join()


def test_an_error_is_raised_when_waiting_and_the_next_save_tries_again(tmp_path, broken):
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, {"w": torch.ones(3)})
        for _ in range(2):
            with pytest.raises(WriteError, match="No space left") as caught:
                handle.wait_durable(60)
        assert caught.value.error_class == "io"
        assert isinstance(caught.value.__cause__.__cause__, OSError)
        assert names(tmp_path) == []
        broken.undo()
        ckpt.save(2, {"w": torch.ones(3)}).wait_durable(60)
    assert steps(tmp_path) == [2]


def test_an_error_nobody_waits_for_is_raised_once_by_the_next_save(tmp_path, broken):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"w": torch.ones(3)})
    with pytest.raises(WriteError, match="an earlier save failed.*No space left"):
        ckpt.save(2, {"w": torch.ones(3)})
    broken.undo()
    ckpt.save(3, {"w": torch.ones(3)})
    ckpt.close()
    ckpt.close()
    assert steps(tmp_path) == [3]


def test_an_interrupt_while_waiting_loses_no_save(tmp_path, gate):
    def train():
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"x": 1})
            timers = [
                threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]),
                threading.Timer(0.3, gate.set),
            ]
            for timer in timers:
                timer.start()
            ckpt.save(2, {"x": 2})

    with pytest.raises(KeyboardInterrupt):
        train()
    assert steps(tmp_path) == [1]


def damage(path):
    with (path / "seg-000000.fps").open("r+b") as segment:
        segment.seek(4096)
        segment.write(b"damage")


def test_a_step_whose_bytes_are_damaged_is_moved_aside(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        path = ckpt.save(1, {"w": torch.ones(3)}).wait_durable(60).path
        damage(path)
        ckpt.save(1, {"w": torch.zeros(3)}).wait_durable(60)
    assert not load(path)["w"].any()
    assert [name[:19] for name in names(tmp_path)] == ["step-0000000001", "step-0000000001.bad"]


def fill(root, *steps_saved, keep=None):
    with Checkpointer(root, keep=keep) as ckpt:
        for step in steps_saved:
            ckpt.save(step, {"step": step})


def test_a_step_below_the_latest_is_refused(tmp_path):
    """Or the next restart would resume from the future that this run left."""
    fill(tmp_path, 100, 101)
    with Checkpointer(tmp_path, keep=1) as ckpt:
        with pytest.raises(PlanError, match="step 5:.*step 101.*resume_from"):
            ckpt.save(5, {})
        ckpt.save(102, {}).wait_durable(60)
        with pytest.raises(PlanError, match="resume_from"):
            ckpt.save(50, {})
    assert steps(tmp_path) == [102]


@pytest.mark.clause("COM-19", "COM-27")
def test_a_run_that_goes_back_resumes_from_its_own_newest_save(tmp_path):
    fill(tmp_path, 500, 880, 890, 900)
    for expected, resume_from, wanted in ((500, 500, (510, 520)), (520, None, (530,))):
        with Checkpointer(tmp_path, keep=2, resume_from=resume_from) as ckpt:
            assert load(ckpt.latest())["step"] == expected
            for step in wanted:
                ckpt.save(step, {"step": step})
    assert load(latest(tmp_path))["step"] == 530
    kept = [name[:26] for name in names(tmp_path)]
    assert kept == [
        "step-0000000520",
        "step-0000000530",
        "step-0000000880.superseded",
        "step-0000000890.superseded",
        "step-0000000900.superseded",
    ]
    assert load(tmp_path / names(tmp_path)[-1]) == {"step": 900}


def test_what_is_damaged_above_the_latest_is_in_nobodys_way(tmp_path):
    fill(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-0000000003")
    assert latest(tmp_path, verify="full").step == 2
    fill(tmp_path, 3)
    damage(tmp_path / "step-0000000002")
    damage(tmp_path / "step-0000000003")
    fill(tmp_path, 2)
    assert latest(tmp_path, verify="full").step == 2


def test_going_back_leaves_what_no_checkpointer_named(tmp_path):
    fill(tmp_path, 1)
    save({}, tmp_path / "best", step=7)
    with pytest.raises(PlanError, match="best has step 7"):
        Checkpointer(tmp_path, resume_from=1)
    assert names(tmp_path) == ["best", "step-0000000001"]


def test_an_error_nobody_waits_for_is_raised_at_close(tmp_path, broken):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"w": torch.ones(3)})
    with pytest.raises(WriteError):
        ckpt.close()


def test_another_exception_is_not_hidden_by_the_error_of_a_save(tmp_path, broken, caplog):
    def train():
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"w": torch.ones(3)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "No space left" in caplog.text


def test_an_error_leaves_the_checkpoints_before_it(tmp_path, broken):
    broken.undo()
    with Checkpointer(tmp_path, keep=1) as ckpt:
        ckpt.save(1, {"x": 1})
    broken.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(WriteError, match="ZeroDivisionError"), Checkpointer(tmp_path, keep=1) as c:
        c.save(2, {"x": 2})
    broken.undo()
    assert names(tmp_path) == ["step-0000000001"]
    assert load(latest(tmp_path)) == {"x": 1}


def test_a_state_that_cannot_be_stored_does_not_poison(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(PlanError, match="set"):
            ckpt.save(1, {"bad": {1}})
        assert names(tmp_path) == []
        ckpt.save(1, {"good": 1})
    assert steps(tmp_path) == [1]


def test_memory_that_runs_out_while_copying(tmp_path, monkeypatch):
    from fpformat_io.torch import sources

    def fail(tensor):
        raise MemoryError

    monkeypatch.setattr(sources, "c_order_copy", fail)
    with Checkpointer(tmp_path) as ckpt, pytest.raises(StagingError, match="12 bytes"):
        ckpt.save(1, {"w": torch.ones(3)})
    assert names(tmp_path) == []


def test_only_the_newest_stay(tmp_path):
    (tmp_path / "notes").mkdir()
    save({"x": 0}, tmp_path / "best", step=0)
    with Checkpointer(tmp_path, keep=2) as ckpt:
        for step in (10, 20, 30, 40):
            ckpt.save(step, {"x": step})
    assert names(tmp_path) == ["best", "notes", "step-0000000030", "step-0000000040"]
    with Checkpointer(tmp_path, keep=1) as ckpt:
        ckpt.save(50, {"x": 50})
    assert steps(tmp_path) == [50]


def test_an_older_one_goes_only_after_the_newer_is_durable(tmp_path, gate):
    gate.set()
    with Checkpointer(tmp_path, keep=1) as ckpt:
        ckpt.save(1, {"x": 1}).wait_durable(60)
        gate.clear()
        ckpt.save(2, {"x": 2})
        assert load(ckpt.latest()) == {"x": 1}
        gate.set()
    assert steps(tmp_path) == [2]


def test_all_stay_unless_somebody_asks(tmp_path):
    fill(tmp_path, *range(6))
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_a_copy_under_another_steps_name_neither_counts_nor_goes(tmp_path):
    fill(tmp_path, 1)
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / "step-0000000002")
    fill(tmp_path, 3, 4, keep=2)
    assert steps(tmp_path) == [2, 3, 4]


def test_one_with_a_file_of_the_users_stays(tmp_path, caplog):
    fill(tmp_path, 1, 2)
    (tmp_path / "step-0000000001" / "notes.txt").write_text("mine")
    fill(tmp_path, 3, 4, keep=1)
    assert steps(tmp_path) == [1, 4]
    assert (tmp_path / "step-0000000001" / "notes.txt").read_text() == "mine"
    assert caplog.text.count("notes.txt") == 1


def test_unloadable_directories_neither_count_nor_go(tmp_path):
    with Checkpointer(tmp_path, keep=1) as ckpt:
        ckpt.save(1, {})
        (tmp_path / "step-0000000009").mkdir()
        ckpt.save(2, {})
    assert steps(tmp_path) == [2, 9]


def test_all_stay_without_a_limit(tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for step in range(5):
            ckpt.save(step, {})
    assert steps(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("step", [-1, 2**53, True, 1.0, "3"], ids=repr)
def test_a_step_that_makes_no_sense(step, tmp_path):
    with pytest.raises(PlanError, match="resume_from"):
        Checkpointer(tmp_path / "c", resume_from=step)
    assert not (tmp_path / "c").exists()
    with Checkpointer(tmp_path / "c") as ckpt, pytest.raises(PlanError, match="step="):
        ckpt.save(step, {})


@pytest.mark.parametrize("keep", [0, -1, True, 1.0, "3"], ids=repr)
def test_a_limit_that_makes_no_sense(keep, tmp_path):
    with pytest.raises(PlanError, match="keep"):
        Checkpointer(tmp_path / "c", keep=keep)
    assert not (tmp_path / "c").exists()


def test_a_step_is_never_saved_twice(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        identity = ckpt.save(1, {"x": 1}).wait_durable(60).checkpoint_id
        with pytest.raises(PlanError, match="saved already"):
            ckpt.save(1, {"x": 2})
        assert ckpt.latest().checkpoint_id == identity
        (tmp_path / "step-0000000002").write_text("a file")
        with pytest.raises(PlanError, match="no directory"):
            ckpt.save(2, {})


@pytest.mark.parametrize("damage", ["manifest", "segment", "cut", "empty"])
def test_an_unloadable_directory_of_the_step_is_moved_aside(tmp_path, damage):
    path = tmp_path / "step-0000000001"
    save({"x": torch.ones(5)}, path, step=1)
    if damage in ("manifest", "empty"):
        (path / "manifest.json").unlink()
    if damage in ("segment", "empty"):
        (path / "seg-000000.fps").unlink()
    if damage == "cut":
        os.truncate(path / "seg-000000.fps", 4096)
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(PlanError, match="function"):
            ckpt.save(1, {"bad": len})
        assert names(tmp_path) == ["step-0000000001"]
        ckpt.save(1, {"x": 2}).wait_durable(60)
        assert load(ckpt.latest()) == {"x": 2}
    assert len(names(tmp_path)) == 2
    assert names(tmp_path)[1].startswith("step-0000000001.bad-")


def test_a_closed_one_takes_no_more(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        pass
    with pytest.raises(PlanError, match="closed"):
        ckpt.save(1, {})


def test_a_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(EngineError, match="root"):
        Checkpointer(tmp_path / "file" / "root")


@pytest.mark.parametrize("how", ["return", "raise"])
def test_the_last_save_before_exit_is_committed(tmp_path, how):
    command = [sys.executable, "-c", SAVE_AND_LEAVE, str(tmp_path), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0 if how == "return" else 3, "")
    found = latest(tmp_path, verify="full")
    assert found.step == 2
    assert (load(found)["w"] == 2).all()


def test_a_relative_root_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run") as ckpt:
        ckpt.save(1, {"x": 1})
        monkeypatch.chdir(tmp_path / "elsewhere")
        ckpt.save(2, {"x": 2})
    assert steps(tmp_path / "run") == [1, 2]
    assert names(tmp_path / "elsewhere") == []


def test_a_default_device_changes_nothing(tmp_path):
    with torch.device("meta"), Checkpointer(tmp_path) as ckpt:
        state = {"w": torch.arange(6.0, device="cpu").view(2, 3).t()}
        ckpt.save(1, state).wait_durable(60)
    assert not differences(state, load(latest(tmp_path)))


def test_a_failing_retirement_is_logged_and_the_save_counts(tmp_path, monkeypatch, caplog):
    with Checkpointer(tmp_path, keep=1) as ckpt:

        def fail(_):
            raise OSError(5, "no listing")

        monkeypatch.setattr(ckpt._retention, "prune", fail)
        ckpt.save(1, {"x": 1}).wait_durable(60)
        ckpt.save(2, {"x": 2}).wait_durable(60)
    assert steps(tmp_path) == [1, 2]
    assert "retiring older checkpoints failed" in caplog.text


def test_a_link_is_never_retired(tmp_path):
    save({"x": 0}, tmp_path / "elsewhere", step=1)
    root = tmp_path / "run"
    root.mkdir()
    (root / "step-0000000001").symlink_to(tmp_path / "elsewhere")
    with Checkpointer(root, keep=1) as ckpt:
        ckpt.save(2, {"x": 2})
        ckpt.save(3, {"x": 3})
    assert names(root) == ["step-0000000001", "step-0000000003"]
    assert load(tmp_path / "elsewhere") == {"x": 0}


def test_metadata_that_does_not_fit_a_manifest(tmp_path):
    with Checkpointer(tmp_path) as ckpt, pytest.raises(PlanError, match="metadata has"):
        ckpt.save(1, {}, metadata={"a": "x" * (9 << 20)})


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_child_can_use_the_checkpointer_of_its_parent(tmp_path, gate, is_waited_for):
    """It has none of the parent's threads, and keeps its hands off the parent's save."""
    ckpt = Checkpointer(tmp_path)
    gate.set()
    handle = ckpt.save(1, {"x": 1})
    if is_waited_for:
        handle.wait_durable(60)
    else:
        handle.wait_durable(60)
        gate.clear()
        handle = ckpt.save(2, {"x": 2})
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(60)
            gate.set()
            if not is_waited_for:
                with pytest.raises(EngineError, match="forked from"):
                    handle.wait_durable()
            with ckpt:
                ckpt.save(3, {"x": 3})
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    handle.wait_durable(60)
    ckpt.close()
    assert steps(tmp_path) == ([1, 3] if is_waited_for else [1, 2, 3])


def test_threads_take_turns(tmp_path):
    """Whatever the order of the steps, one save runs at a time and none is lost without a word."""
    done, refused = [], []

    def work(step):
        try:
            done.append(ckpt.save(step, {"step": step}).wait_durable(60).path)
        except PlanError:
            refused.append(step)

    with Checkpointer(tmp_path) as ckpt:
        threads = [threading.Thread(target=work, args=[step]) for step in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(done) + len(refused) == 8
    assert len(steps(tmp_path)) == len(done)
    assert steps(tmp_path)[-1] == 7


AT_EXIT = """
import atexit, sys, torch
from fpformat_io.torch import Checkpointer
ckpt = Checkpointer(sys.argv[1])
atexit.register(lambda: ckpt.save(1, {"w": torch.ones(1_000_000)}))
"""


def test_a_save_of_an_exit_handler_is_committed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert load(latest(tmp_path))["w"].sum() == 1_000_000


GONE = """
import os, sys
from fpformat_io.errors import EngineError
from fpformat_io.torch import Checkpointer, save
os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
for call in (lambda: Checkpointer("runs"), lambda: save({}, "c")):
    try:
        call()
    except EngineError as error:
        assert error.error_class == "io", error
    else:
        raise AssertionError
"""


def test_a_relative_root_without_a_working_directory(tmp_path):
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", GONE, tmp_path / "gone"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
