"""What is said where a call cannot be divided among devices."""

import warnings

_warned = set()


def warn(message: str) -> None:
    """Warns, once for all calls of which the same is to be said."""
    if message not in _warned:
        warnings.warn(f"jax_softmax: {message}.", stacklevel=3)
        _warned.add(message)


def warn_anyway(message: str) -> None:
    """The same where nothing may be raised: a filter that makes errors of warnings is not heeded."""
    try:
        warn(message)
    except UserWarning:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warn(message)
