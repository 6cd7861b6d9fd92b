"""Builds the site of the installed version, beside those of other versions.

python docs/build.py SITE [--url URL]

SITE gets a folder for this version, versions.json for the menu of versions, and an index.html that leads to the newest
release, or to the newest version if none is released. URL is where SITE will be served; by default it is the root of a
host. Warnings are errors.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

import jax_softmax


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    folder = options.site / jax_softmax.__version__
    strict = ["--fail-on-warning", "--keep-going", "--nitpicky", "--fresh-env", "--quiet"]
    status = subprocess.run([sys.executable, "-P", "-m", "sphinx", *strict, Path(__file__).parent, folder]).returncode
    if status:
        return status
    versions = sorted((Version(path.parent.name) for path in options.site.glob("*/objects.inv")), reverse=True)
    newest = next((version for version in versions if not version.is_prerelease), versions[0])
    entries = [
        {"version": str(v), "url": f"{options.url}/{v}/", "name": f"{v} (newest)" if v == newest else str(v)}
        for v in versions
    ]
    (options.site / "versions.json").write_text(json.dumps(entries, indent=2) + "\n")
    page = f'<!doctype html><title>jax_softmax</title><meta http-equiv="refresh" content="0; url={newest}/">\n'
    (options.site / "index.html").write_text(page)
    print(f"built {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
