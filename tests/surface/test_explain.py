"""What `explain` says: the plan and the floor, as values and as text. Needs no GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import WAYS

import jax_softmax
from jax_softmax import explain
from jax_softmax.runtime import explain as module
from jax_softmax.runtime.explain import GPUS

# Defaults to whatever GPU the tests run on.
H200 = {"device": "H200"}


@pytest.mark.parametrize(
    "shape,axis,rows,columns",
    [
        ((8192, 50257), -1, 8192, 50257),
        ((256, 1024, 512), 1, 256 * 512, 1024),
        ((256, 1024, 512), (0, 2), 1024, 256 * 512),
        ((3, 4, 5), None, 1, 60),
        ((3, 4, 5), (), 60, 1),
        ((), None, 1, 1),
    ],
)
def test_rows(shape, axis, rows, columns):
    assert f"  rows      {rows:,} of {columns:,} columns\n" in str(explain(shape, axis, **H200))


@pytest.mark.parametrize("device", ["H200", "T4", "RTX 5090"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax_vjp"])
def test_says_what_the_plan_says(op, way, device):
    e = explain(way.shape, way.axes, "bfloat16", op=op, device=device)
    model = GPUS[device]._asdict()
    del model["copy_rate"]
    chosen = support.plan(way.shape, way.axes, op, "bfloat16", on=model)
    if chosen["why_xla"]:
        assert (e.schedule, e.launches) == ("jax.numpy", ())
        return
    assert e.schedule == chosen["schedule"]
    assert [launch._asdict() for launch in e.launches] == [
        {name: step[name] for name in ("blocks", "threads", "cluster", "shared_bytes")} for step in chosen["steps"]
    ]
    assert f"  schedule  {e.schedule}: {module._SCHEDULES[e.schedule]}\n" in str(e)
    assert str(e).count("\n  kernel ") == len(e.launches)


def test_every_schedule_is_described():
    reached = {way.plan()["schedule"] for way in WAYS}  # all that there are: see test_schedules.py
    assert reached | {"jax.numpy", "nothing"} == set(module._SCHEDULES)


def test_text():
    e = explain((8192, 50257), dtype="bfloat16", **H200)
    (launch,) = e.launches
    assert str(e).split("\n") == [
        "softmax of bfloat16 (8192, 50257) along (1,), H200",
        "  rows      8,192 of 50,257 columns",
        f"  schedule  chunks: {module._SCHEDULES['chunks']}",
        f"  kernel    {launch.blocks:,} x {launch.threads:,} threads in clusters of {launch.cluster}, "
        f"{launch.shared_bytes:,} bytes of dynamic shared memory",
        "  bytes     1,646,821,376 (1 read, 1 written)",
        "  floor     383 µs at 4.3 TB/s",
    ]


@pytest.mark.parametrize("op,tensors", [("softmax", 2), ("log_softmax", 2), ("softmax_linear", 3)])
@pytest.mark.parametrize("dtype,itemsize", [("float16", 2), (jnp.bfloat16, 2), (np.float32, 4), ("float64", 8)])
def test_bytes_and_floor(op, tensors, dtype, itemsize):
    e = explain((100, 1000), 0, dtype, op=op, **H200)
    assert e.bytes == tensors * 100_000 * itemsize
    assert e.floor_us == pytest.approx(e.bytes / 4.3e12 * 1e6)
    assert explain((100, 1000), 0, dtype, op=op, device="T4").floor_us > 10 * e.floor_us


@pytest.mark.parametrize("struct", [False, True])
def test_mask(struct):
    mask = jnp.ones((5, 1, 32), bool)
    where = jax.ShapeDtypeStruct(mask.shape, mask.dtype) if struct else mask
    e = explain((4, 5, 6, 32), (2, 3), where=where, **H200)
    assert e.bytes == 2 * 3840 * 4 + 160
    assert ", mask (5, 1, 32)" in str(e) and "the mask)" in str(e)


def test_mask_may_enlarge_the_result():
    e = explain((5, 1), where=np.ones((3, 5, 4), bool), **H200)
    assert (e.shape, e.axes) == ((3, 5, 4), (2,))
    assert explain((5, 6), where=True, **H200).mask_shape == ()
    assert explain((4, 6), where=jax.ShapeDtypeStruct((2, 4, 6), "bool"), op="logsumexp", **H200).shape == (2, 4, 6)


@pytest.mark.parametrize(
    "x,dtype,expected",
    [
        ((2, 3), None, "float32"),
        ([2, 3], "float16", "float16"),
        ((np.int64(2), 3), "int32", "float32"),
        ((2, 3), "bool", "float32"),
        ((2, 3), "float8_e4m3fn", "float32"),
        ((2, 3), "float64", "float64"),
        (np.ones((2, 3)), None, "float32"),  # as softmax takes it with 64-bit dtypes off
        (np.ones((2, 3), "int8"), None, "float32"),
        (jax.ShapeDtypeStruct((2, 3), "bfloat16"), None, "bfloat16"),
        (jax.ShapeDtypeStruct((2, 3), "float64"), None, "float64"),
        (jax.ShapeDtypeStruct((2, 3), "bfloat16"), "float32", "float32"),
    ],
)
def test_dtypes_are_promoted_as_by_softmax(x, dtype, expected):
    assert explain(x, dtype=dtype, **H200).dtype == expected


def test_arrays_and_numbers():
    x = jnp.ones((6, 7), jnp.bfloat16)
    assert explain(x, 0, **H200) == explain((6, 7), 0, "bfloat16", **H200)
    assert explain(2.5, None, **H200).shape == ()
    assert jax.jit(lambda x: explain(x, **H200).shape[0] * x)(jnp.ones((6, 7)))[0, 0] == 6


def test_without_a_kernel():
    """Of a dtype and a rank that none covers, of a view where XLA is faster, and of more than any kernel counts."""
    for e in (
        explain((4, 5), dtype="complex64"),
        explain((2,) * 13),
        explain((1000, 300, 4, 3), (1, 3), **H200),
        explain((2**63 - 1,)),
    ):
        assert (e.schedule, e.launches) == ("jax.numpy", ())
        assert e.why_xla and f"XLA's own operations: {e.why_xla}\n" in str(e)
    e = explain((0, 5))
    assert (e.schedule, e.launches, e.bytes, e.floor_us) == ("nothing", (), 0, 0)
    assert explain((5, 0), where=jnp.ones((5, 1), bool)).bytes == 0
    assert "nothing" in str(e)


@pytest.mark.parametrize("device", sorted(GPUS))
def test_huge_arrays(device):
    e = explain((2**33, 5, 401), 1, dtype="float64", device=device)
    assert e.bytes == 2 * 8 * 2**33 * 5 * 401 and str(e)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e5m2"])
def test_public_names(dtype):
    """Of all functions of logits; what is no kernel's name is explained as the kernel that it runs."""
    same = {
        "softmax_vjp": "softmax",
        "softmax_cross_entropy": "logsumexp",
        "cross_entropy_loss": "cross_entropy_gradient",
        "linear_cross_entropy": "cross_entropy_gradient",
        "absmax_scale": f"absmax_scale_{'bfloat16' if dtype == 'bfloat16' else 'float32'}",
    }
    others = {"Explanation", "Fused", "FusionReport", "TokenLosses", "build_info", "explain", "export_checks"}
    for name in set(jax_softmax.__all__) - others - {"fuse", "use"}:
        found = explain((64, 1024), dtype=dtype, op=name, **H200)
        assert found == explain((64, 1024), dtype=dtype, op=same.get(name, found.op), **H200)


def test_is_frozen():
    e = explain((2, 3))
    assert isinstance(e, jax_softmax.Explanation)
    assert hash(e) == hash(explain((2, 3)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        e.bytes = 1


@pytest.mark.parametrize(
    "kind,name",
    [
        ("H200", "H200"),
        ("h100", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_device_names(kind, name):
    assert module._matching_gpu(kind) == name


def test_default_device():
    default = jax.devices()[0]
    known = module._matching_gpu(default.device_kind) if default.platform == "gpu" else None
    assert explain((2, 3)).device == (known or "H200")
    with jax.default_device(jax.devices("cpu")[0]):
        assert explain((2, 3)).device == "H200"


@pytest.mark.parametrize(
    "arguments,error,match",
    [
        ({"axis": 2}, ValueError, "axis must be an int from -2 to 1"),
        ({"axis": (0, -2)}, ValueError, "twice"),
        ({"axis": "a"}, TypeError, "axis must be an int"),
        ({"axis": 1.0}, TypeError, "axis must be an int"),
        ({"where": np.ones(4, bool)}, ValueError, "where must broadcast"),
        ({"where": np.ones(3)}, TypeError, "boolean"),
        ({"where": jax.ShapeDtypeStruct((3,), "float32")}, TypeError, "boolean"),
        ({"where": "a"}, TypeError, "boolean"),
        ({"op": "softmin"}, ValueError, "op must be one of softmax, log_softmax, softmax_linear, "),
        ({"device": "Z80"}, ValueError, "device must be one of H200, "),
        ({"device": jax.devices("cpu")[0]}, ValueError, "device must be one of H200, "),
        ({"device": 3}, TypeError, "device must be a name"),
        ({"x_or_shape": (2, -3)}, ValueError, "ints from 0 to"),
        ({"x_or_shape": (2, 3.0)}, TypeError, "ints"),
        ({"x_or_shape": (2**63,)}, ValueError, "ints from 0 to 2\\^63 - 1"),
        ({"x_or_shape": (2**40, 2**40)}, ValueError, "arrays of 2\\^63 elements or more"),
        ({"x_or_shape": (2**62, 1), "where": jax.ShapeDtypeStruct((1, 4), "bool")}, ValueError, "2\\^63 elements"),
        ({"x_or_shape": "ab"}, TypeError, "explain: x_or_shape must be an array, .*, got one of type str"),
        ({"x_or_shape": None}, TypeError, "explain: x_or_shape must be an array, .*, got one of type NoneType"),
        ({"x_or_shape": np.array(["a"])}, TypeError, "explain: x_or_shape must be an array, .*, got one of dtype <U1"),
        (
            {"x_or_shape": 128},
            TypeError,
            r"explain: x_or_shape must be an array, .* \(a tuple of ints\), got the int 128",
        ),
        ({"dtype": "float33"}, TypeError, "explain: dtype must be one that JAX has, or None, got 'float33'"),
        ({"dtype": "datetime64[D]"}, TypeError, "explain: dtype must be one that JAX has, or None, got"),
        ({"op": "logsumexp", "dtype": "complex64"}, TypeError, "x_or_shape must be real, got complex64"),
        ({"op": "absmax_scale_int8", "dtype": "complex64"}, TypeError, "x_or_shape must be real, got complex64"),
        ({"op": "entropy", "dtype": "complex64"}, TypeError, "x_or_shape must be real, got complex64"),
    ],
)
def test_errors(arguments, error, match):
    with pytest.raises(error, match=match):
        explain(**{"x_or_shape": (2, 3), **arguments})
