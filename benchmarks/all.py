"""Makes the tables of results/ that this machine can make, in parts, each by a process of its own.

    python benchmarks/all.py --minutes 8 --out FOLDER [--flax PATH]    # again, until it says that all are made

FOLDER gets the pages and pictures, and a folder `parts` of what later calls need. A part that is made by the sources as
they are, on such a GPU with such a driver, is not made again. A part that the end of the minutes cut is the next call's
first. One that failed, or was cut though it had all the minutes, is later calls' last. Machines without a GPU make the
table of CPUs, those with two GPUs the tables of two as well. PATH is a checkout of Flax, without which real.py is left
out.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LONGEST = 480.0  # seconds of a part
LIMITS_MISSED = 2  # the exit status of two_gpus.py, whose table is there all the same


class Part(NamedTuple):
    """A call of a program that makes a page, or some rows of one."""

    page: str
    command: tuple[str, ...]
    writes: bool = False  # the page, into the folder that --output names; others print it
    n_gpus: int = 1


def split(page: str, n: int, *more) -> list[Part]:
    return [Part(page, (f"{page}.py", "--part", str(k), str(n)), *more) for k in range(n)]


PARTS = [
    *split("models", 3, True),
    *(Part("linear_cross_entropy", ("linear_cross_entropy.py", "--shapes", str(k)), True) for k in range(4)),
    *(Part(page, (f"{page}.py",)) for page in ("attention", "losses", "gpt", "absmax_scale", "fused")),
    *split("never_slower", 3, True),
    *(
        Part("results", ("run.py", "--only", section), True)
        for section in ("compiling", "few", "chain", "accuracy", "axes", "rows")
    ),
    *(Part(page, (f"{page}.py",), False, 2) for page in ("two_gpus", "fused_on_two_gpus")),
    *split("cpu", 6, False, 0),
]


def gpus() -> list[str]:
    """The names of this machine's GPUs, with their drivers."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return []
    return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def sources() -> str:
    """A short hash of the kernels' sources, and of the package's, which choose among the kernels."""
    paths = sorted([*HERE.parent.glob("csrc/**/*.*"), *HERE.parent.glob("jax_softmax/**/*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def made(part: Part, work: Path, seconds: float) -> str:
    """What the program wrote or printed, or "" if there is no table in it."""
    page = work / f"{part.page}.md"
    page.unlink(missing_ok=True)
    command = [sys.executable, HERE / part.command[0], *part.command[1:]]
    if part.writes:
        subprocess.run([*command, "--output", work], timeout=seconds)
        text = page.read_text() if page.exists() else ""
    else:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
        text = done.stdout if done.returncode in (0, LIMITS_MISSED) else ""
    return text if rows(text) else ""


def rows(text: str) -> list[str]:
    """Those of the tables, under their heads."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("|") and not set(line) - set("|- ")]
    return [line for line in lines[heads[0] + 1 :] if line.startswith("|")] if heads else []


def plain(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def make_all(parts: Sequence[Part], out: Path, minutes: float, version: str) -> int:
    """Makes what is missing until the minutes are over; returns how many parts are then missing."""
    deadline = time.monotonic() + 60 * minutes
    work = out / "parts" / plain(version)
    files = {part: work / part.page / f"{plain(' '.join(part.command))}.made" for part in parts}
    failed = {part: path.with_suffix(".failed") for part, path in files.items()}
    missing = [part for part in parts if not files[part].exists()]
    for i, part in enumerate(sorted(missing, key=lambda part: failed[part].exists())):
        seconds = min(deadline - time.monotonic(), LONGEST)
        if seconds <= 0:
            break
        begun = time.monotonic()
        print(f"{' '.join(part.command)} ...", flush=True)
        files[part].parent.mkdir(parents=True, exist_ok=True)
        try:
            text = made(part, files[part].parent, seconds)
        except subprocess.TimeoutExpired:
            if i == 0 or seconds == LONGEST:
                failed[part].touch()
            print(f"... cut after {seconds:.0f} s", flush=True)
            continue
        (files[part] if text else failed[part]).write_text(text)
        print(f"... {'made' if text else 'FAILED'} in {time.monotonic() - begun:.0f} s", flush=True)

    for page in dict.fromkeys(part.page for part in parts):
        of_page = [files[part] for part in parts if part.page == page]
        if all(path.exists() for path in of_page):
            whole = [work / page / f"{page}.md"] if page == "results" else of_page  # run.py keeps its earlier sections
            first, *others = [path.read_text().rstrip() for path in whole]
            text = "\n".join([first, *(row for other in others for row in rows(other))])
            (out / f"{page}.md").write_text(f"{text}\n\nSources {version}.\n")
            for picture in of_page[0].parent.glob("*.png"):
                shutil.copy(picture, out)
    return sum(not path.exists() for path in files.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flax", type=Path)
    options = parser.parse_args()
    names = gpus()
    parts = [part for part in PARTS if (0 < part.n_gpus <= len(names) if names else part.n_gpus == 0)]
    if options.flax and names:
        parts.append(Part("real", ("real.py", "--flax", str(options.flax.absolute())), writes=True))
    version = f"{sources()} on {names[0] if names else 'a CPU'}"
    n_missing = make_all(parts, options.out, options.minutes, version)
    print(f"{n_missing} of {len(parts)} parts are missing: run it again" if n_missing else "all are made")
    return int(n_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
