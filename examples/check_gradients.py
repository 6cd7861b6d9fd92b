"""Check first and second derivatives of jax_softmax against finite differences, in forward and reverse mode.

Runs ``jax.test_util.check_grads`` at order 2 on ``softmax`` and ``log_softmax``: as they are, under ``jax.jit``, under
``jax.vmap`` and under both, with and without a mask, in float32 and float64. Prints one line per check and exits with
status 1 if any fails:

    pip install jax_softmax
    python check_gradients.py
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

import jax_softmax

TRANSFORMATIONS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
}


# The step of the finite differences. In float32 the default, 1e-4, loses too many digits to cancellation: jax.nn's own
# log_softmax fails with it. The cube root of the machine epsilon balances rounding and truncation errors.
STEPS = {"float32": 5e-3, "float64": None}


def check(function, transform, dtype, masked):
    """Return None if the derivatives are right, else the first line of what check_grads says."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(3, 4, 5)), dtype)
    mask = random.random(x.shape) < 0.7
    mask[..., 0] = True  # a row with nothing to include has no softmax

    def unmasked_function(x):
        return function(x, axis=-1)

    def masked_function(x, mask):
        # Excluded entries of log_softmax are -inf, which finite differences cannot handle; zero leaves the rest.
        return jnp.where(mask, function(x, axis=-1, where=mask), 0)

    if masked:
        transformed = transform(masked_function)
        target = lambda x: transformed(x, mask)  # noqa: E731
    else:
        target = transform(unmasked_function)
    try:
        check_grads(target, (x,), order=2, eps=STEPS[dtype])
    except AssertionError as error:
        return str(error).strip().partition("\n")[0]


def main():
    jax.config.update("jax_enable_x64", True)  # float64 finite differences are the sharper test
    failures = 0
    for function in (jax_softmax.softmax, jax_softmax.log_softmax):
        for dtype in ("float32", "float64"):
            for masked in (False, True):
                for name, transform in TRANSFORMATIONS.items():
                    error = check(function, transform, dtype, masked)
                    failures += error is not None
                    mask = "mask" if masked else "no mask"
                    label = f"{function.__name__:11}  {dtype}  {mask:7}  {name:11}"
                    print(f"{label}  {'ok' if error is None else f'FAILED: {error}'}", flush=True)
    if failures:
        sys.exit(f"{failures} checks failed")
    print("all checks passed")


if __name__ == "__main__":
    main()
