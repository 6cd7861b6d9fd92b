"""Handlers of CUDA kernels, called as XLA calls them, in a process whose GPUs only count: see `counting_gpu.cc`.

`python` starts such a process, which has this module's names.
"""

import ctypes
import functools
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np

from jax_softmax import _kernels

__all__ = ["Call", "_kernels", "gpu"]
HERE = pathlib.Path(__file__).parent
_STAGES = {"initialize": 2, "execute": 3}
_TYPES = {"float32": 11, "bfloat16": 16, "int8": 2, "int32": 4, "bool": 1}


class Launch(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("words", ctypes.c_void_p * 64)]


def python(library, *bodies):
    """Runs the bodies in a process that has preloaded the library, with this module's names at hand."""
    hidden = "jax_plugins", "jax_cuda12_plugin", "jax_cuda13_plugin"  # they would ask these GPUs for more
    start = f"import sys\nsys.modules |= dict.fromkeys({hidden})\n"
    start += f"from counting_gpu import *\n_kernels.jit_configure({library!r}, '', 0)\n"
    command = [sys.executable, "-P", "-c", start + "".join(map(textwrap.dedent, bodies))]
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": path}
    environment |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def gpu():
    found = ctypes.CDLL(None)
    found.new_call.restype = ctypes.c_void_p
    found.run.restype = ctypes.c_char_p
    found.launched.restype = ctypes.POINTER(Launch)
    return found


class Call:
    """A custom call in a program: operands and results are shapes and dtypes, as `_kernels.plan` takes them."""

    def __init__(self, handlers, operands, results, attributes):
        self.call = ctypes.c_void_p(gpu().new_call())
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self.handlers = {stage: ctypes.c_void_p(address(handler, None)) for stage, handler in handlers.items()}
        for is_result, arrays in ((False, operands), (True, results)):
            for shape, dtype in arrays:
                gpu().add_buffer(self.call, is_result, _TYPES[dtype], *_numbers(shape))
        for name, value in sorted(attributes.items()):
            if isinstance(value, str):
                gpu().add_text(self.call, name.encode(), value.encode())
            elif np.ndim(value):
                gpu().add_numbers(self.call, name.encode(), *_numbers(value))
            else:
                gpu().add_number(self.call, name.encode(), ctypes.c_int64(value))

    def run(self, stage, ordinal=0, stream=0, address=1 << 20, step=1 << 20):
        """Executes a stage. Operands and then results are at `address`, `address + step` and so on.

        Raises:
          RuntimeError: the handler's error.
        """
        at = ctypes.c_void_p(stream), ctypes.c_size_t(address), ctypes.c_size_t(step)
        if message := gpu().run(self.call, self.handlers[stage], _STAGES[stage], ordinal, *at):
            raise RuntimeError(message.decode())


def _numbers(numbers):
    return ctypes.c_int64(len(numbers)), (ctypes.c_int64 * len(numbers))(*numbers)
