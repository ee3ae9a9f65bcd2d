"""What a writer does where the file system has no locks, or cannot sync a directory; and modes."""

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from fpformat import SaveError, SavePlan, SegmentPlan, verify_checkpoint, write_checkpoint
from fpformat.names import staging_name
from fpformat.publish import durability, leftovers
from fpformat.publish.durability import is_local, make_directories, sync_directory
from fpformat.publish.leftovers import STALE_UNLOCKED_AGE_S, collect, dead
from fpformat.publish.staging import Staging

SAVE_ID = bytes(range(1, 17))
NO_LOCKS = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.ENOLCK,
    errno.EINVAL,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
)
NO_SYNC = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


def write(path):
    return write_checkpoint(path, SavePlan(segments=(SegmentPlan(entries=(), parts=()),)), {})


def failing(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def failing_for_directories(code):
    fsync = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    return fail


@pytest.mark.clause("COM-2")
@pytest.mark.parametrize("code", NO_LOCKS, ids=errno.errorcode.get)
def test_a_save_goes_on_without_locks_and_says_so(tmp_path, monkeypatch, code):
    monkeypatch.setattr(fcntl, "flock", failing(code))
    report = write(tmp_path / "c")
    assert len(report.warnings) == 1
    assert "no locks" in report.warnings[0]
    assert str(tmp_path) in report.warnings[0]
    assert verify_checkpoint(tmp_path / "c").problems == ()


def test_a_lock_that_somebody_else_has_is_an_error_of_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EWOULDBLOCK))
    with pytest.raises(SaveError) as caught:
        write(tmp_path / "c")
    assert caught.value.errno == errno.EWOULDBLOCK
    assert list(tmp_path.iterdir()) == []


MOUNTS = r"""
1 0 254:0 / / rw - ext4 /dev/a rw
2 1 0:23 / /dev/shm rw shared:7 - tmpfs tmpfs rw
3 1 0:40 / /data rw - ext4 /dev/b rw
4 1 0:41 / /data rw master:2 - nfs4 server:/data rw,vers=4.2
5 4 0:42 / /data/my\040scratch rw - xfs /dev/c rw
6 1 0:43 / /home rw - fuse.sshfs server: rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", True),
        ("/root/c", True),
        ("/dev/shm/c", True),
        ("/data/c", False),
        ("/data/my scratch/c", True),
        ("/data/my", False),
        ("/database/c", True),
        ("/home/c", False),
    ],
)
def test_file_systems_of_this_machine_alone(path, expected, tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS[1:])
    monkeypatch.setattr(durability, "_MOUNTS", str(mounts))
    monkeypatch.setattr(os.path, "realpath", str)
    assert is_local(Path(path)) is expected
    mounts.unlink()
    assert is_local(Path(path)) is False


@pytest.mark.clause("COM-18")
def test_a_lock_that_could_be_taken_proves_nothing_where_other_machines_write(
    tmp_path, monkeypatch
):
    staging = tmp_path / staging_name(SAVE_ID)
    staging.mkdir()
    now = staging.stat().st_mtime
    monkeypatch.setattr(leftovers, "is_local", lambda path: False)
    for age, expected in ((3600.0, []), (STALE_UNLOCKED_AGE_S + 10, [staging])):
        os.utime(staging, (now - age, now - age))
        assert dead(tmp_path) == expected


@pytest.mark.clause("COM-4", "COM-5", "COM-8")
@pytest.mark.parametrize("code", NO_SYNC, ids=errno.errorcode.get)
def test_a_directory_that_cannot_be_synced_is_a_warning(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "fsync", failing_for_directories(code))
    report = write(tmp_path / "new" / "c")
    assert report.warnings
    assert all("cannot sync directories" in warning for warning in report.warnings)
    # Each names a directory that the next save has too, so that it is said once and not at each.
    assert not any(".fps-" in warning for warning in report.warnings)
    assert verify_checkpoint(tmp_path / "new" / "c").problems == ()


def test_any_other_error_of_a_sync_is_one_of_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing_for_directories(errno.EIO))
    with pytest.raises(SaveError):
        write(tmp_path / "c")
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    with pytest.raises(SaveError):
        write(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.clause("COM-18")
def test_what_cannot_be_locked_is_left_until_it_is_old(tmp_path, monkeypatch):
    staging = tmp_path / staging_name(SAVE_ID)
    staging.mkdir()
    segment = staging / "seg-000000.fps"
    segment.write_bytes(b"x")
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    now = segment.stat().st_mtime
    old = now - STALE_UNLOCKED_AGE_S - 10

    for directory_time, segment_time, expected in (
        (now, now, ()),
        (old, now, ()),  # somebody still writes
        (now, old, ()),
        (old, old, (staging,)),
    ):
        os.utime(segment, (segment_time, segment_time))
        os.utime(staging, (directory_time, directory_time))
        assert tuple(dead(tmp_path, min_age_s=0)) == expected
    assert collect(tmp_path, warn=pytest.fail) == (staging,)


def test_one_that_was_made_anew_since_it_was_opened_is_left(tmp_path, monkeypatch):
    staging = tmp_path / staging_name(SAVE_ID)
    staging.mkdir()
    os.utime(staging, (1, 1))
    real = fcntl.flock

    def late(descriptor, operation):
        staging.rename(tmp_path / "gone")
        staging.mkdir()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert collect(tmp_path, warn=pytest.fail) == ()
    assert staging.is_dir()


def test_a_writer_removes_what_dead_ones_left_beside_it(tmp_path):
    staging = tmp_path / staging_name(SAVE_ID)
    staging.mkdir()
    (staging / "seg-000000.fps").write_bytes(b"x")
    os.utime(staging, (1, 1))
    report = write(tmp_path / "c")
    assert report.removed == (staging,)
    assert os.listdir(tmp_path) == ["c"]


def test_a_directory_that_cannot_be_listed_can_be_saved_into(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", failing(errno.EACCES))
    assert write(tmp_path / "c").removed == ()


@pytest.mark.parametrize("mask", [0o002, 0o007, 0o022, 0o077], ids=oct)
def test_modes_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write(tmp_path / "runs" / "c")
    finally:
        os.umask(before)
    for path in (tmp_path / "runs", *(tmp_path / "runs").rglob("*")):
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~mask, path


def test_every_directory_that_is_made_is_made_durable(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    make_directories(tmp_path / "a" / "b", pytest.fail)
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    make_directories(tmp_path / "a" / "b", pytest.fail)
    assert len(synced) == 2
    sync_directory(tmp_path / "a" / "b", pytest.fail)
    assert synced[2:] == [str(tmp_path / "a" / "b")]


def in_child(work) -> int:
    """Return the exit status of a forked child that does `work`."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_has_no_share_in_the_lock_of_its_parent(tmp_path):
    """Or a save that died would look alive as long as the child lives."""
    staging = Staging(tmp_path / "c", SAVE_ID)
    told, tell = os.pipe()
    is_there, say = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        os.write(say, b"x")
        os.read(told, 1)  # until the parent is through
        os._exit(0)
    os.close(told)
    assert os.read(is_there, 1) == b"x"
    try:
        assert collect(tmp_path, warn=pytest.fail, min_age_s=0) == ()
        os.close(staging._descriptor)  # as the end of the process does
        assert collect(tmp_path, warn=pytest.fail, min_age_s=0) == (staging.path,)
    finally:
        staging._descriptor = -1
        os.waitpid(child, os.close(tell) or 0)
        os.close(is_there)
        os.close(say)


def test_a_child_removes_nothing_of_its_parents_save(tmp_path):
    staging = Staging(tmp_path / "c", SAVE_ID)
    os.close(staging.create_segment(0))
    assert in_child(staging.abandon) == 0
    assert os.listdir(staging.path) == ["seg-000000.fps"]
    staging.abandon()
    assert list(tmp_path.iterdir()) == []
