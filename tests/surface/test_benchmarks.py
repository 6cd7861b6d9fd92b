"""benchmarks/all.py makes what is missing, and goes on where it was cut."""

import importlib
import subprocess
import types

import pytest

every = importlib.import_module("all")  # of benchmarks/

PROGRAM = """
import pathlib, sys, time
name, seconds, folder = sys.argv[1], float(sys.argv[2]), pathlib.Path(__file__).parent
with open(folder / "begun", "a") as begun:
    print(name, file=begun)
time.sleep(seconds)
if (folder / f"{name} fails").exists():
    sys.exit("an error")
page = f"# Title\\n\\nA GPU.\\n\\n| case | µs |\\n|---|---|\\n| {name} | 1 |\\n"
if "--output" in sys.argv:
    pathlib.Path(sys.argv[-1], "written.md").write_text(page)
else:
    print(page)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(every, "HERE", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "begun").touch()
    return tmp_path


def part(page, name, seconds=0.0, **more):
    return every.Part(page, ("program.py", name, str(seconds)), **more)


def begun(folder):
    names = (folder / "begun").read_text().split()
    (folder / "begun").write_text("")
    return names


def test_what_is_made_is_not_made_again(folder):
    parts = [part("printed", "a"), part("printed", "b"), part("written", "c", writes=True)]
    assert every.make_all(parts, folder / "out", 1, "version 1") == 0
    assert begun(folder) == ["a", "b", "c"]
    text = (folder / "out" / "printed.md").read_text()
    assert text.startswith("# Title") and "---|\n| a | 1 |\n| b | 1 |\n" in text and "Sources version 1" in text
    assert "| c | 1 |" in (folder / "out" / "written.md").read_text()

    assert every.make_all(parts, folder / "out", 1, "version 1") == 0 and begun(folder) == []
    assert every.make_all(parts, folder / "out", 1, "version 2") == 0 and begun(folder) == ["a", "b", "c"]


def test_a_part_that_is_cut_is_the_next_first_and_then_the_last(folder, monkeypatch):
    """By a clock that stands still but for parts, which nobody waits for."""
    clock, run = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now), subprocess.run

    def run_by_the_clock(command, timeout, **options):
        *command, seconds = command
        clock.now += min(float(seconds), timeout)
        done = run([*command, "0"], **options)
        if float(seconds) > timeout:
            raise subprocess.TimeoutExpired(command, timeout)
        return done

    monkeypatch.setattr(every, "time", clock)
    monkeypatch.setattr(every.subprocess, "run", run_by_the_clock)
    parts = [part("page", "a", 1), part("page", "long", 60), part("other", "b", 1)]
    assert every.make_all(parts, folder / "out", 4 / 60, "version") == 2
    assert begun(folder) == ["a", "long"] and not (folder / "out" / "page.md").exists()
    assert every.make_all(parts, folder / "out", 1 / 60, "version") == 2 and begun(folder) == ["long"]
    assert every.make_all(parts, folder / "out", 4 / 60, "version") == 1 and begun(folder) == ["b", "long"]
    assert (folder / "out" / "other.md").exists()


def test_a_part_that_fails_is_tried_again(folder):
    (folder / "a fails").touch()
    parts = [part("page", "a"), part("other", "b")]
    assert every.make_all(parts, folder / "out", 1, "version") == 1 and begun(folder) == ["a", "b"]
    (folder / "a fails").unlink()
    assert every.make_all(parts, folder / "out", 1, "version") == 0 and begun(folder) == ["a"]


def test_parts_call_programs_that_are_there():
    assert all((every.HERE / part.command[0]).exists() for part in every.PARTS)
