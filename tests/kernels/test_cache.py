"""The folder of compiled kernels: found again by other processes, and never the reason for a wrong or failed call."""

import functools
import os
import re
import shutil
import time

import pytest

from jax_softmax import _kernels
from jax_softmax.runtime import cuda

CODE = 'extern "C" __global__ void kernel(float* x) { x[threadIdx.x] *= %d; }'


def test_other_processes_read_it(jit):
    binary = jit.binary(CODE % 2)
    assert jit.counts() == (1, 0, 1)
    jit.fresh()
    assert jit.binary(CODE % 2) == binary and jit.counts() == (0, 1, 0)
    facts = _kernels.jit_facts()
    assert facts["cache_entries"] == 1 and facts["cache_bytes"] == jit.entries()[0].stat().st_size


@pytest.mark.parametrize(
    "damage",
    [
        lambda data, other: data[:-1],
        lambda data, other: data[: len(data) // 2],
        lambda data, other: data[:10],
        lambda data, other: b"",
        lambda data, other: data + b"\0",
        lambda data, other: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        lambda data, other: b"J" + data[1:],
        lambda data, other: other,
        lambda data, other: os.urandom(len(data)),
    ],
    ids=["short", "half", "line", "empty", "long", "bit", "magic", "foreign", "random"],
)
def test_damaged_entries_are_replaced(jit, damage):
    binary = jit.binary(CODE % 2)
    (path,) = jit.entries()
    data = path.read_bytes()
    jit.binary(CODE % 3)
    (other,) = set(jit.entries()) - {path}
    path.write_bytes(damage(data, other.read_bytes()))
    jit.fresh()
    assert jit.binary(CODE % 2) == binary and jit.counts() == (1, 0, 1)
    assert path.read_bytes() == data
    jit.fresh()
    assert jit.binary(CODE % 2) == binary and jit.counts() == (0, 1, 0)


def test_folders_that_cannot_be_written(jit, tmp_path, capfd):
    (tmp_path / "file").touch()
    for folder in ("", tmp_path / "file", tmp_path / "file" / "below", "/proc/jax_softmax", "/dev/null"):
        jit.fresh(folder)
        for i in range(2):
            assert jit.binary(CODE % i)[:4] == b"\x7fELF"
        assert jit.counts() == (2, 0, 0)
        assert _kernels.jit_facts()["cache_entries"] == 0
    assert capfd.readouterr() == ("", "")


def test_read_only_folder_is_read(jit):
    binary = jit.binary(CODE % 2)
    jit.folder.chmod(0o555)
    try:
        jit.fresh()
        assert jit.binary(CODE % 2) == binary and jit.counts() == (0, 1, 0)
        jit.binary(CODE % 3)
        assert jit.counts() == (1, 1, int(os.access(jit.folder, os.W_OK)))  # a superuser may write even there
    finally:
        jit.folder.chmod(0o755)


def test_full_disk(jit):
    # A limit on the size of files stands for the disk: a write ends in the middle of an entry.
    process = jit.python(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        assert len(binary({CODE!r} % 2)) > 1000
        assert _kernels.jit_facts()["written"] == 0
        """
    )
    output = process.communicate(timeout=60)[0]
    assert (process.returncode, output) == (0, "")
    assert jit.entries() == []


def test_two_processes_at_once(jit):
    script = f"""
        print("ready", flush=True)
        sys.stdin.readline()
        sys.exit(any(binary({CODE!r} % i)[:4] != b"\\x7fELF" for i in range(5)))
        """
    processes = [jit.python(script, stdin=-1) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)
    assert len(jit.entries()) == 5
    for i in range(5):
        jit.binary(CODE % i)
    assert jit.counts() == (0, 5, 0)


def test_the_folder_may_vanish(jit):
    jit.binary(CODE % 2)
    shutil.rmtree(jit.folder)
    jit.binary(CODE % 3)
    assert len(jit.entries()) == 1


def test_size_is_bounded(jit):
    binaries = [jit.binary(CODE % i) for i in range(4)]
    entries = jit.entries()
    for path in entries:
        os.utime(path, (1e9, 1e9))
    (jit.folder / "notes.txt").write_text("not ours")
    jit.fresh()
    assert jit.binary(CODE % 2) == binaries[2]  # and so the one that is in use
    in_use = max(entries, key=lambda path: path.stat().st_mtime)

    jit.fresh(most_bytes=2 * max(path.stat().st_size for path in entries) + 100)
    jit.binary(CODE % 5)
    kept = set(jit.entries())
    assert len(kept) == 3 and {in_use, jit.folder / "notes.txt"} < kept
    jit.fresh()
    jit.binary(CODE % 2)
    jit.binary(CODE % 5)
    assert jit.counts() == (0, 2, 0)


def test_what_ended_early_is_removed(jit):
    jit.folder.mkdir(0o700)
    old, young = jit.folder / "0-old.unfinished", jit.folder / "0-young.unfinished"
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    jit.binary(CODE % 2)
    assert not old.exists() and young.exists()


# ---- Kernels run on the GPU with all that the user may do there, so nobody else's are read


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("needs a superuser")
    os.chown(path, 12345, -1)


def replace_by_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


OTHERS_MAY_WRITE = {
    "group": (lambda path: path.chmod(0o770), r"group or others may write to .* \(mode 770\)"),
    "others": (lambda path: path.chmod(0o702), r"group or others may write to .* \(mode 702\)"),
    "owner": (give_away, r" belongs to user 12345, not to 0"),
}


@pytest.mark.parametrize("expose,reason", OTHERS_MAY_WRITE.values(), ids=OTHERS_MAY_WRITE)
def test_folders_of_others_are_not_used(jit, expose, reason, capfd):
    jit.binary(CODE % 2)
    expose(jit.folder)
    jit.fresh()
    facts = _kernels.jit_facts()
    assert re.search(reason, facts["cache_unsafe"]) and str(jit.folder) in facts["cache_unsafe"]
    assert facts["cache_entries"] == 0
    jit.binary(CODE % 2)
    jit.binary(CODE % 3)
    assert jit.counts() == (2, 0, 0) and len(jit.entries()) == 1
    assert capfd.readouterr() == ("", "")


ENTRIES_OF_OTHERS = {**OTHERS_MAY_WRITE, "link": (replace_by_link, r" is no regular file")}


@pytest.mark.parametrize("expose,reason", ENTRIES_OF_OTHERS.values(), ids=ENTRIES_OF_OTHERS)
def test_entries_of_others_are_replaced(jit, expose, reason):
    binary = jit.binary(CODE % 2)
    (path,) = jit.entries()
    expose(path)
    jit.fresh()
    facts = _kernels.jit_facts()
    assert re.search(reason, facts["cache_unsafe"]) and str(path) in facts["cache_unsafe"]
    assert facts["cache_entries"] == 0
    assert jit.binary(CODE % 2) == binary and jit.counts() == (1, 0, 1)
    jit.fresh()
    assert jit.binary(CODE % 2) == binary and jit.counts() == (0, 1, 0)
    assert _kernels.jit_facts()["cache_unsafe"] == ""


def test_a_pipe_is_not_waited_for(jit):
    jit.binary(CODE % 2)
    (path,) = jit.entries()
    path.unlink()
    os.mkfifo(path, 0o600)
    process = jit.python(f"binary({CODE!r} % 2)")
    assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)
    assert path.is_file()


def test_links_to_folders_are_followed(jit):
    folder = jit.folder.with_name("other")
    folder.mkdir(0o755)  # as older versions made them
    jit.folder.symlink_to(folder)
    jit.binary(CODE % 2)
    jit.fresh()
    jit.binary(CODE % 2)
    assert jit.counts() == (0, 1, 0)
    folder.chmod(0o770)
    jit.fresh()
    jit.binary(CODE % 2)
    assert jit.counts() == (1, 0, 0) and str(jit.folder) in _kernels.jit_facts()["cache_unsafe"]


def test_folders_and_entries_are_the_users_alone(jit):
    folder = jit.folder / "above" / "itself"
    umask = os.umask(0)
    try:
        jit.fresh(folder)
        jit.binary(CODE % 2)
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.parents[:2])] == [0o700] * 3
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_replaced_entries_are_other_files(jit):
    """Who reads the old one, reads it to its end."""
    jit.binary(CODE % 2)
    (path,) = jit.entries()
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with path.open("rb") as reader:
        jit.fresh()
        jit.binary(CODE % 2)
        assert reader.read() == data[:-1] and path.read_bytes() == data
        assert os.fstat(reader.fileno()).st_ino != path.stat().st_ino


def test_one_warning_says_what_is_not_used(jit, monkeypatch):
    jit.folder.mkdir()
    jit.folder.chmod(0o770)
    monkeypatch.setenv("JAX_SOFTMAX_CACHE_DIR", str(jit.folder))
    monkeypatch.setattr(_kernels, "driver_version", lambda: 99000)
    available = functools.cache(cuda.availability.__wrapped__)
    with pytest.warns(UserWarning, match=rf"others may write to {jit.folder} .*JAX_SOFTMAX_CACHE_DIR") as warned:
        assert available() is None and available() is None
    assert len(warned) == 1


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_SOFTMAX_CACHE_DIR", str(tmp_path))
    assert cuda.cache_folder() == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_SOFTMAX_CACHE_DIR", "below")  # wherever the process goes afterwards
    assert cuda.cache_folder() == str(tmp_path / "below")
    monkeypatch.delenv("JAX_SOFTMAX_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cuda.cache_folder().startswith(str(tmp_path)) and cuda.cache_folder().endswith("jax_softmax")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without a home
    assert cuda.cache_folder() == ""
