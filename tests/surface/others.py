"""Runs optax's and JAX's own tests of softmax, log-sum-exp and cross entropies on this package's functions.

    python tests/surface/others.py [FOLDER WITH JAX'S TESTS]

optax is installed with its tests. JAX is not, nor are they in its source distribution: they are the folder `tests` of a
checkout of the installed version. Without it optax's are run alone.
"""

import os
import subprocess
import sys
from pathlib import Path

import optax
import pytest

import jax_softmax

OPTAX = Path(optax.losses.__file__).parent
# Files, and which of their tests.
TESTS_OF_OPTAX = [OPTAX / "_classification_test.py"], "SoftmaxCrossEntropy or PolyLoss or CTC"
TESTS_OF_JAX = (
    ["nn_test.py", "lax_scipy_test.py", "lax_scipy_special_functions_test.py"],
    "softmax or logsumexp or LogMeanExp or DotProductAttention or CustomJVPLeak",
)
# Why tests fail that are expected to.
EXPECTED_TO_FAIL = {
    "testSoftmaxGradFlag": "counts what the softmax that JAX had before keeps, which a flag of JAX's brings back"
}


def pytest_configure():
    jax_softmax.use(losses=True)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name in EXPECTED_TO_FAIL:
            item.add_marker(pytest.mark.xfail(reason=EXPECTED_TO_FAIL[item.name], strict=True))


def passes(files, which):
    """Runs pytest in a process with this file as a plugin."""
    options = ["-v", "--tb=short", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-p", "others"]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", *options, "-k", which, *map(str, files)]
    return subprocess.run(command, env=environment).returncode == 0


if __name__ == "__main__":
    suites = [TESTS_OF_OPTAX]
    if len(sys.argv) > 1:
        files, which = TESTS_OF_JAX
        suites.append(([Path(sys.argv[1]) / file for file in files], which))
    sys.exit(not all([passes(*suite) for suite in suites]))
