"""Makes the tables of results/ that this machine can make, part by part, each in a process of its own.

    python benchmarks/all.py --minutes 8 --out FOLDER [--checkout NAME=PATH ...]    # again, until all are made

FOLDER gets the pages and pictures, and a folder `parts` with what later calls need. A part is made again only if the
sources, the GPU or the driver have changed. If the minutes end while a part runs, the next call begins with it. A part
that failed, or that took longer than all the minutes, is the last one of later calls. Machines without a GPU make the
table of CPUs; those with two GPUs also make the tables of two. The checkouts are real.py's; without one it is not run.
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
LONGEST = 480.0  # seconds that a part may take
LIMITS_MISSED = 2  # two_gpus.py's exit status if it printed its table, but missed a limit


class Part(NamedTuple):
    """A page, or some rows of one, and the program that makes it."""

    page: str
    command: tuple[str, ...]
    writes: bool = False  # whether the program writes the page into the folder named by --output, or prints it
    n_gpus: int = 1


def split(page: str, n: int, *more) -> list[Part]:
    return [Part(page, (f"{page}.py", "--part", str(k), str(n)), *more) for k in range(n)]


STEPS = ("2x128", "6x256", "12x768", ".py")  # parts of the names of steps.py's programs

PARTS = [
    *split("models", 3, True),
    *(Part("linear_cross_entropy", ("linear_cross_entropy.py", "--shapes", str(k)), True) for k in range(4)),
    *(Part(page, (f"{page}.py",)) for page in ("attention_prices", "losses", "gpt", "absmax_scale", "fused")),
    *split("attention", 2),
    *split("never_slower", 3, True),
    *(Part("steps", ("steps.py", "--only", name)) for name in STEPS),
    *(Part("first_steps", ("steps.py", "--first", "--only", name)) for name in STEPS),
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
    """A short hash of the sources of csrc/ and of the package."""
    paths = sorted([*HERE.parent.glob("csrc/**/*.*"), *HERE.parent.glob("jax_softmax/**/*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def run_part(part: Part, work: Path, seconds: float) -> str:
    """The text that the program wrote or printed, or "" if there is no table in it."""
    page = work / f"{part.page}.md"
    page.unlink(missing_ok=True)
    command = [sys.executable, HERE / part.command[0], *part.command[1:]]
    if part.writes:
        subprocess.run([*command, "--output", work], timeout=seconds)
        text = page.read_text() if page.exists() else ""
    else:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
        text = done.stdout if done.returncode in (0, LIMITS_MISSED) else ""
    return text if table_rows(text) else ""


def table_rows(text: str) -> list[str]:
    """The rows of the text's tables, without their heads."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("|") and not set(line) - set("|- ")]
    return [line for line in lines[heads[0] + 1 :] if line.startswith("|")] if heads else []


def file_name(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def make_all(parts: Sequence[Part], out: Path, minutes: float, version: str) -> int:
    """Makes missing parts until the minutes are over, and returns how many are still missing."""
    deadline = time.monotonic() + 60 * minutes
    work = out / "parts" / file_name(version)
    files = {part: work / part.page / f"{file_name(' '.join(part.command))}.made" for part in parts}
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
            text = run_part(part, files[part].parent, seconds)
        except subprocess.TimeoutExpired:
            if i == 0 or seconds == LONGEST:
                failed[part].touch()
            print(f"... cut after {seconds:.0f} s", flush=True)
            continue
        (files[part] if text else failed[part]).write_text(text)
        print(f"... {'made' if text else 'FAILED'} in {time.monotonic() - begun:.0f} s", flush=True)

    for page in dict.fromkeys(part.page for part in parts):
        page_files = [files[part] for part in parts if part.page == page]
        if all(path.exists() for path in page_files):
            whole = [work / page / f"{page}.md"] if page == "results" else page_files  # run.py adds to one page
            first, *others = [path.read_text().rstrip() for path in whole]
            text = "\n".join([first, *(row for other in others for row in table_rows(other))])
            (out / f"{page}.md").write_text(f"{text}\n\nSources {version}.\n")
            for picture in page_files[0].parent.glob("*.png"):
                shutil.copy(picture, out)
    return sum(not path.exists() for path in files.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=PATH")
    options = parser.parse_args()
    names = gpus()
    parts = [part for part in PARTS if (0 < part.n_gpus <= len(names) if names else part.n_gpus == 0)]
    if options.checkout and names:
        given = [word for checkout in options.checkout for word in ("--checkout", checkout)]
        parts += [part._replace(command=(*part.command, *given)) for part in split("real", 6, True)]
    version = f"{sources()} on {names[0] if names else 'a CPU'}"
    n_missing = make_all(parts, options.out, options.minutes, version)
    print(f"{n_missing} of {len(parts)} parts are missing: run it again" if n_missing else "all are made")
    return int(n_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
