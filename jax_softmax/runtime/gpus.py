"""The GPUs that `explain` knows: what plans and floors depend on."""

import re
from typing import Any, NamedTuple

import jax


class Gpu(NamedTuple):
    compute_capability: int  # 10 * major + minor
    multiprocessors: int
    shared_memory_per_block: int  # bytes, opted in
    largest_cluster: int
    copy_rate: float  # bytes per second, read and written together


# Copy rates: the H200's as measured, the others 90 % of the data sheet's.
GPUS = {
    "H200": Gpu(90, 132, 227 << 10, 16, 4.3e12),
    "GH200": Gpu(90, 132, 227 << 10, 16, 0.9 * 4.0e12),
    "H100": Gpu(90, 132, 227 << 10, 16, 0.9 * 3.35e12),
    "H100 NVL": Gpu(90, 132, 227 << 10, 16, 0.9 * 3.9e12),
    "H100 PCIe": Gpu(90, 114, 227 << 10, 16, 0.9 * 2.0e12),
    "B200": Gpu(100, 148, 227 << 10, 16, 0.9 * 7.7e12),
    "A100": Gpu(80, 108, 163 << 10, 1, 0.9 * 2.039e12),
    "A100 40GB": Gpu(80, 108, 163 << 10, 1, 0.9 * 1.555e12),
    "A10": Gpu(86, 72, 99 << 10, 1, 0.9 * 600e9),
    "L4": Gpu(89, 58, 99 << 10, 1, 0.9 * 300e9),
    "L40S": Gpu(89, 142, 99 << 10, 1, 0.9 * 864e9),
    "T4": Gpu(75, 40, 64 << 10, 1, 0.9 * 320e9),
    "RTX 3090": Gpu(86, 82, 99 << 10, 1, 0.9 * 936e9),
    "RTX 4090": Gpu(89, 128, 99 << 10, 1, 0.9 * 1008e9),
    "RTX 5090": Gpu(120, 170, 99 << 10, 8, 0.9 * 1792e9),
}
# Words that make a chip another one, or a part of one, than its name says.
_OTHER_CHIPS = {"LAPTOP", "MIG", "D", "TI"}


def name_of(device: Any) -> str:
    """The key in GPUS, of what `explain` is given as `device`."""
    if device is None:
        default = jax.config.jax_default_device
        default = default if isinstance(default, jax.Device) else jax.devices(default)[0]
        return (_known(default.device_kind) if default.platform == "gpu" else None) or "H200"
    if not isinstance(device, str | jax.Device):
        raise TypeError(
            f"explain: device must be a name, a jax.Device or None, got one of type {type(device).__name__}."
        )
    kind = device if isinstance(device, str) else device.device_kind
    name = _known(kind)
    if name is None:
        raise ValueError(f"explain: device must be one of {', '.join(GPUS)}, got {kind!r}.")
    return name


def _known(kind: str) -> str | None:
    """The entry all of whose words are in a device's name, such as NVIDIA A100-SXM4-40GB; the one of most words."""

    def words(text):
        return set(re.split(r"[^A-Z0-9]+", text.upper())) - {""}

    given = words(kind)
    names = [] if given & _OTHER_CHIPS else [name for name in GPUS if words(name) <= given]
    return max(names, key=lambda name: len(words(name)), default=None)
