"""Who decides what kernels do under `fuse`, who compiles them, and who calls them: one object, a `Backend`.

JAX calls the rules that ask it, and has no argument for it. So they ask the one that is `in_use`. Tests put others in
its place by `using`.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_softmax.fusion.kernels.memory import Balance
from jax_softmax.fusion.kernels.traffic import Traffic
from jax_softmax.runtime import judge
from jax_softmax.runtime.lowering import TARGET

if TYPE_CHECKING:
    from jax_softmax.fusion.attention.matcher import FoundAttention
    from jax_softmax.fusion.kernels.fused_kernel import FusedKernel


class Backend:
    """The GPU's: decisions of `runtime/judge.py`, NVRTC, and XLA's custom call."""

    def kernel_wins(self, judged: Traffic | Balance) -> bool:
        """Whether a kernel moves so many fewer bytes than XLA that it makes a call, or a program's kernels save enough
        time for the memory that they need."""
        return judged.kernel_wins

    def reason_for_xla(self, kernel: "FusedKernel") -> str:
        """Why XLA makes a kernel's call whatever the traffic is; "" if it does not."""
        return judge.reason_on_all_gpus(kernel.spec)

    def reason_against_attention(self, found: "FoundAttention") -> str:
        """Why attention's kernels do not make what was found; "" if they do."""
        attention, extents = found.attention, found.extents
        batch, batch_of_keys = (
            math.prod(extents[c] for c in letters)
            for letters in (attention.letters.batch, attention.letters.batch_of_keys)
        )
        visible_part = attention.visible.part(**extents)
        work = judge.Attention(
            batch,
            batch_of_keys,
            extents,
            visible_part,
            {kernel: attention.reads_arrays(kernel) for kernel in attention.kernels},
            found.bytes_per_score,
            found.n_products,
            found.bytes_of_number,
            found.bytes_of_query,
        )
        return judge.reason_against_attention(work)

    def start_compiling(self, kernel: "FusedKernel") -> None:
        """Starts to compile a kernel for this machine's GPUs."""
        judge.start_compiling(kernel.spec)

    def call(self, kernel: "FusedKernel", *operands: jax.Array) -> Sequence[jax.Array]:
        """The results of a kernel's custom call."""
        self.start_compiling(kernel)  # on several devices each has a kernel for its part
        spec, types = kernel.spec, kernel.result_types
        n = len(types)
        if scratch := judge.scratch_bytes(spec):
            types.append(jax.ShapeDtypeStruct((scratch,), jnp.uint8))
        aliases = {} if kernel.in_place is None else {kernel.in_place: 0}
        ffi_call = jax.ffi.ffi_call(TARGET, types, input_output_aliases=aliases)
        return ffi_call(*operands, **spec.attributes)[:n]


_backend = Backend()


def in_use() -> Backend:
    """The backend that rules ask."""
    return _backend


@contextlib.contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Has rules ask this backend while the context lasts."""
    global _backend
    before, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = before
