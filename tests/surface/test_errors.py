"""A wrong argument is refused with its name, what was given and what is allowed, eagerly and under jit alike."""

import ctypes
import functools
import pathlib
import re

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.experimental import sparse
from support import OPERATORS

import jax_softmax
from jax_softmax.runtime.kernel_spec import attributes

X = np.zeros((3, 4), np.float32)

every_function = pytest.mark.parametrize("f", OPERATORS.values(), ids=OPERATORS)


def assert_refused(kind, words, f, *args, **kwargs):
    """`words`: the argument's name, then what else the message has to mention; "|" between alternatives."""
    with pytest.raises(kind) as caught:
        f(*args, **kwargs)
    message = str(caught.value)
    assert re.search(rf"\b({words[0]})\b", message), f"nothing of {words[0]!r} in {message!r}"
    for alternatives in words[1:]:
        assert any(word in message for word in alternatives.split("|")), f"nothing of {alternatives!r} in {message!r}"
    assert len(message) < 300, message


@every_function
@pytest.mark.parametrize(
    "axis,given", [(1.0, "1.0|float"), (np.float32(0), "0.0|float"), ("rows", "rows|str"), ((0, "rows"), "rows|str")]
)
def test_axis_of_another_type(f, axis, given):
    f(X, 1)  # equal to 1.0, and compiled
    assert_refused(TypeError, ("axis", given, "int"), f, X, axis)
    assert_refused(TypeError, ("axis", given, "int"), f, X, axis=(axis,) if not isinstance(axis, tuple) else axis)


@every_function
@pytest.mark.parametrize(
    "axis", [{0}, np.array([0.0]), np.array([[0]]), [[0]], iter([0]), slice(1)], ids=lambda a: type(a).__name__
)
def test_axis_that_is_no_sequence_of_ints(f, axis):
    assert_refused(TypeError, ("axis", type(axis).__name__, "int"), f, X, axis)


@every_function
def test_axis_that_is_traced(f):
    for axis in (0, jnp.array([0, 1])):
        assert_refused(TypeError, ("axis", "int", "traced"), jax.jit(lambda axis: f(X, axis)), axis)


@every_function
def test_axis_by_its_name(f):
    """Which is an argument of its own."""
    assert_refused(TypeError, ("axis", "'i'", "axis_name"), jax.vmap(lambda x: f(x, axis="i"), axis_name="i"), X)


@every_function
@pytest.mark.parametrize("axis", [2, -3, 100, (0, 2), (-3, 1)], ids=str)
def test_axis_out_of_range(f, axis):
    given = "|".join(str(a) for a in np.atleast_1d(axis) if not -2 <= a < 2)
    assert_refused(ValueError, ("axis|axes", given, "2"), f, X, axis)


@every_function
def test_axis_of_a_scalar(f):
    for x in (1.0, True, np.float32(1), jnp.float32(1)):
        for axis in (0, -1, (0,)):
            assert_refused(ValueError, ("axis", str(axis), "None or ()", "0 dimensions"), f, x, axis)
        assert_refused(ValueError, ("axis", "-1", "None or ()"), f, x)


@every_function
@pytest.mark.parametrize("axis", [(0, 0), (1, -1), (0, 1, -2)], ids=str)
def test_axis_given_twice(f, axis):
    assert_refused(ValueError, ("axis|axes", str(axis), "duplicate|twice|distinct|repeat|unique"), f, X, axis)


@every_function
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_mask_of_another_type(f, dtype):
    for convert in (np.asarray, jnp.asarray):
        assert_refused(TypeError, ("where", dtype, "bool"), f, X, where=convert(np.ones((3, 4), dtype)))
    assert_refused(TypeError, ("where", "bool"), f, X, where=1.0)


@every_function
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4), (5, 3, 5)], ids=str)
def test_mask_that_does_not_broadcast(f, shape):
    given = str(shape)[1:-1].rstrip(",")
    assert_refused(ValueError, ("where", given, "3, 4", "broadcast"), f, X, where=np.ones(shape, bool))


@every_function
@pytest.mark.parametrize(
    "x", ["logits", [1.0, 2.0], [[1, 2], [3, 4]], None, {"a": 1}, object()], ids=lambda x: type(x).__name__
)
def test_x_that_is_no_array(f, x):
    assert_refused(TypeError, ("x", type(x).__name__, "array"), f, x)


OF_REAL_NUMBERS = {
    "x": (
        jax_softmax.logsumexp,
        jax_softmax.absmax_scale,
        lambda x: jax_softmax.softmax(x, sink=0.0),
        lambda x: jax_softmax.linear_cross_entropy(x, X.T, np.zeros(3, int)),
    ),
    "logits": (
        jax_softmax.entropy,
        lambda x: jax_softmax.cross_entropy_loss(x, np.zeros(3, int)),
        lambda x: jax_softmax.softmax_cross_entropy(x, X),
        lambda x: jax_softmax.softmax_cross_entropy_with_integer_labels(x, np.zeros(3, int)),
    ),
    "logits_p": (lambda x: jax_softmax.kl_divergence(x, X),),
    "logits_q": (lambda x: jax_softmax.kl_divergence(X, x),),
}


@pytest.mark.parametrize("argument,f", [(argument, f) for argument, fs in OF_REAL_NUMBERS.items() for f in fs])
def test_what_has_to_be_an_array_of_real_numbers(argument, f):
    for x in ("a", None, [1.0]):
        assert_refused(TypeError, (argument, type(x).__name__, "a floating, integer or boolean dtype"), f, x)
    for dtype in ("<U1", "object"):
        x = np.full((3, 4), "a", dtype)
        assert_refused(TypeError, (argument, dtype, "a floating, integer or boolean dtype"), f, x)
    assert_refused(TypeError, (argument, "complex64", "real"), f, X.astype("complex64"))


NO_NUMBERS = {
    "object": np.array([object(), None]),
    "<U1": np.array(["a", "b"]),
    "datetime64[D]": np.array(["2020-02-20"], "datetime64[D]"),
    "timedelta64[s]": np.zeros(2, "timedelta64[s]"),
    ">f4": np.zeros(2, ">f4"),
    ">i2": np.zeros(2, ">i2"),
    "float0": np.zeros(2, jax.dtypes.float0),
    "key<fry>": jax.random.key(0),
    np.dtype(np.longdouble).name: np.zeros(2, np.longdouble),
    np.dtype(np.clongdouble).name: np.clongdouble(1),
}


@every_function
@pytest.mark.parametrize("dtype", NO_NUMBERS)
def test_arrays_of_other_dtypes(f, dtype):
    x = NO_NUMBERS[dtype]
    assert_refused(TypeError, ("x", "dtype", dtype, "floating, integer, boolean or complex"), f, x, None)
    assert_refused(TypeError, ("where", "dtype", dtype, "boolean array or None"), f, X, where=x)


class Unknown:
    """Neither an array nor convertible to one, but with the attributes of one."""

    shape, dtype, ndim = (3, 4), np.dtype(bool), 2


@every_function
@pytest.mark.parametrize(
    "value", [sparse.BCOO.fromdense(jnp.eye(4)), jax.ShapeDtypeStruct((3, 4), "bool"), Unknown()], ids=lambda x: type(x)
)
def test_what_only_looks_like_an_array(f, value):
    assert_refused(TypeError, ("x", type(value).__name__, "array or a number"), f, value)
    assert_refused(TypeError, ("where", type(value).__name__, "boolean array or None"), f, X, where=value)


@every_function
def test_under_jit(f):
    for kind, words, axis, where in (
        (TypeError, ("axis", "int"), 1.5, None),
        (ValueError, ("axis|axes", "5"), 5, None),
        (ValueError, ("axis|axes", "(0, 0)"), (0, 0), None),
        (TypeError, ("where", "float32", "bool"), -1, jnp.ones(4)),
        (ValueError, ("where", "broadcast"), -1, jnp.ones(3, bool)),
    ):
        assert_refused(kind, words, jax.jit(lambda x, a=axis, m=where, f=f: f(x, a, m)), X)


@every_function
def test_the_fault_is_named_from_within_vmap(f):
    """By the shape of one example, which is what the caller of vmap wrote the axis for."""
    assert_refused(ValueError, ("axis|axes", "1"), jax.vmap(lambda x: f(x, 1)), X)
    assert_refused(ValueError, ("where", "3", "4", "broadcast"), jax.vmap(lambda x: f(x, 0, jnp.ones(3, bool))), X)


@every_function
def test_unknown_arguments(f):
    assert_refused(TypeError, ("initial",), f, X, initial=0.0)


# ---- Within `fuse`: as `jit` has it, of the user's function, file, line and argument


def branch(params, x):
    return jax.nn.softmax(x) if params["w"].sum() > 0 else x


def number(params, x):
    return jnp.zeros(int(x[0, 0]))


def numpy_of(params, x):
    return np.asarray(jax.nn.softmax(x))


def shape_of(params, *, x):
    return jnp.zeros(x[0, 0])


def shapes(params, x):
    return jax.nn.softmax(x) @ params["w"]


def no_array(params, x):
    return {"a": jax.nn.softmax(x), "b": "text"}


def of_text(params, x, text):
    return x


class Model:
    def __call__(self, params, x):
        return branch(params, x)

    def method(self, params, x):
        return branch(params, x)


IN_FUSED = {
    **{f.__name__: f for f in (branch, number, numpy_of, shapes, no_array)},
    "keyword": lambda params, x: shape_of(params, x=x),
    "partial": functools.partial(branch),
    "method": Model().method,
    "within jit": jax.jit(branch),
}


def error_of(f, *args, **kwargs):
    with pytest.raises(Exception) as caught:
        f(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("name", IN_FUSED)
def test_errors_within_fused_functions_are_those_of_jit(name):
    f, args = IN_FUSED[name], ({"w": X}, X)
    expected = error_of(jax.jit(f), *args)
    fused = jax_softmax.fuse(f)
    for g in (fused, jax.jit(fused), fused.lower, fused.explain):
        error = error_of(g, *args)
        assert (type(error), str(error)) == (type(expected), str(expected))


def test_errors_name_the_fused_function_of_an_object():
    message = str(error_of(jax_softmax.fuse(Model()), {"w": X}, X))
    assert re.search(r"__call__ at .*test_errors.py.* argument params\['w'\]", message), message


def test_errors_name_what_is_no_argument_of_jit():
    """An array that JAX has not the dtype of, by its path; and the fused function where jit is around it."""
    args = {"w": X}, X, np.array(["a"])
    message = str(error_of(jax.jit(of_text), *args))
    found = str(error_of(jax_softmax.fuse(of_text), *args))
    assert "path text" in message and re.sub("0x[0-9a-f]+", "", found) == re.sub("0x[0-9a-f]+", "", message)
    assert "fuse(<function of_text" in str(error_of(jax.jit(jax_softmax.fuse(of_text)), {"w": X}, "a"))


def test_a_leaked_tracer_is_one_of_the_fused_function():
    kept = []

    def leaks(x):
        kept.append(x)
        return jax.nn.softmax(x)

    jax_softmax.fuse(leaks)(X)
    assert f"leaks at {__file__}" in str(error_of(lambda: kept[0] + 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_errors_of_modules_name_arguments():
    nnx = pytest.importorskip("flax.nnx")

    def step(model, batch):
        return model(batch["x"]) if batch["x"][0, 0] > 0 else 0

    message = str(error_of(jax_softmax.fuse(step), nnx.Linear(4, 2, rngs=nnx.Rngs(0)), {"x": X}))
    assert f"step at {__file__}" in message and "argument batch['x']" in message, message


# ---- What the lowering never hands to a kernel, which would read or write beyond its buffers


def array(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def floats(*shape):
    return [jax.ShapeDtypeStruct(shape, np.float32)]


def bools(*shape):
    return np.ones(shape, bool)


WRONG_CALLS = {
    "operator": ("softmin", [X], floats(3, 4), "unknown operator softmin"),
    "no operand": ("softmax", [], floats(3, 4), "wrong number"),
    "one operand": ("softmax_linear", [X], floats(3, 4), "wrong number"),
    "no row operands": ("cross_entropy_gradient", [X], floats(3, 4) + 2 * floats(3, 1), "an operand is missing"),
    "many operands": ("softmax", [X, *7 * [array(3, 1)]], floats(3, 4), "wrong number"),
    "one result": ("logsumexp", [X], floats(3, 1), "wrong number"),
    "many results": ("softmax", [X], 3 * floats(3, 4), "wrong number"),
    "operand's shape": ("softmax_linear", [X, array(3, 5)], floats(3, 4), "operands differ in shape"),
    "operand's rank": ("softmax_linear", [X, array(4)], floats(3, 4), "operands differ in shape"),
    "operand's dtype": (
        "softmax_linear",
        [X, array(3, 4, dtype="float16")],
        floats(3, 4),
        "the operands differ in dtype",
    ),
    "integers": ("softmax", [array(3, 4, dtype="int32")], floats(3, 4), "unsupported dtype int32"),
    "8 bits": ("softmax", [array(3, 4, dtype="int8")], floats(3, 4), "unsupported dtype int8"),
    "result's shape": ("softmax", [X], floats(3, 3), "result differs in shape"),
    "result's rank": ("softmax", [X], floats(12), "result differs in shape"),
    "result's dtype": ("softmax", [X], [jax.ShapeDtypeStruct((3, 4), np.int8)], "unsupported dtype of a result, int8"),
    "rows' shape": ("logsumexp", [X], floats(3, 1) + floats(1, 4), "result of rows"),
    "rows' rank": ("logsumexp", [X], floats(3) + floats(3), "result of rows"),
    "rows' dtype": ("logsumexp", [X], 2 * [jax.ShapeDtypeStruct((3, 1), np.float16)], "result of rows"),
    "row operand's shape": (
        "cross_entropy_gradient",
        [X, *3 * [array(3, 1)], array(1, 1), array(3, 1, dtype="int32")],
        floats(3, 4) + 2 * floats(3, 1),
        "of extent 1 along the axes",
    ),
    "row operand's dtype": (
        "cross_entropy_gradient",
        [X, *3 * [array(3, 1)], array(3, 1, dtype="float16"), array(3, 1, dtype="int32")],
        floats(3, 4) + 2 * floats(3, 1),
        "in the dtype of the arithmetic",
    ),
    "label's dtype": ("cross_entropy", [X, array(3, 1, dtype="int8")], 3 * floats(3, 1), "labels int32"),
    "mask's shape": ("softmax", [X, bools(3, 3)], floats(3, 4), "must be 1 or 4"),
    "mask's rank": ("softmax", [X, bools(1, 3, 4)], floats(3, 4), "an operand that broadcasts"),
}
# What the attributes say of the operands that broadcast.
WRONG_SIDES = {
    "mask's dtype": ("mask", [array(3, 4, dtype="int32")], "masks boolean"),
    "two masks": ("mask mask", [bools(3, 4), bools(3, 4)], "wrong number"),
    "no mask": ("mask", [], "an operand is missing"),
    "label": ("label", [array(3, 1, dtype="int32")], "wrong number"),
    "unknown": ("side", [array(3, 1)], "no such operand: side"),
    "dimension": ("index:2", [], "no such dimension: index:2"),
    "no dimension": ("index:x", [], "no such dimension: index:x"),
    "on a CPU": ("array", [array(3, 1)], "there is no CPU kernel"),
}


def refused_call(operands, results, message, **given):
    call = jax.ffi.ffi_call("jax_softmax", results)
    with support.on_a_cpu(), pytest.raises(Exception, match=message):
        jax.block_until_ready(call(*operands, **given))


@pytest.mark.parametrize("op,operands,results,message", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_calls_with_wrong_buffers(op, operands, results, message):
    known = op if op != "softmin" else "softmax"
    masked = len(operands) > 0 and operands[-1].dtype == bool
    refused_call(operands, results, message, **attributes(known, (1,), masked) | {"op": op})


@pytest.mark.parametrize("sides,operands,message", WRONG_SIDES.values(), ids=WRONG_SIDES)
def test_calls_with_wrong_sides(sides, operands, message):
    given = attributes("softmax", (1,), masked=False) | {"sides": sides}
    refused_call([X, *operands], floats(3, 4), message, **given)


@pytest.mark.parametrize("axes", [(2,), (-1,), (1, 1)])
def test_calls_with_wrong_axes(axes):
    refused_call([X], floats(3, 4), "axes must be distinct", **attributes("softmax", axes, masked=False))


def test_calls_of_other_versions():
    """As programs hold them that another version exported."""
    given = attributes("softmax", (1,), masked=False)
    refused_call([X], floats(3, 4), "another version of jax_softmax", **given | {"version": np.int64(0)})
    del given["version"]
    refused_call([X], floats(3, 4), "another version of jax_softmax", **given)


# A handler as ours are, one of whose ranges throws; it counts those that have ended.
HANDLER = """
#include <stdexcept>
#include <string>
#include "ffi/custom_call.h"
#include "ffi/ranges.h"
namespace ffi = xla::ffi;

ffi::Error run(ffi::ThreadPool pool, ffi::Result<ffi::Buffer<ffi::S32>> result, int64_t bad) {
  std::atomic<int> ended{0};
  jax_softmax::for_ranges(pool, pool.num_threads(), 50, 50, [&ended, bad](int64_t begin, int64_t) {
    if (begin == bad) throw std::runtime_error("range " + std::to_string(begin));
    ++ended;
  });
  *result->typed_data() = ended;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(handler, jax_softmax::returning_errors(run),
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<int64_t>("bad"));
"""


@emulated.compiler_is_needed
def test_what_a_handler_throws_is_an_error(tmp_path):
    sources = pathlib.Path(__file__).parents[2] / "csrc"
    if not sources.is_dir():
        pytest.skip("needs the sources")
    (tmp_path / "handler.cc").write_text(HANDLER)
    library = emulated.shared_library(tmp_path / "handler.cc", f"-I{sources}", f"-I{jax.ffi.include_dir()}")
    handler = jax.ffi.pycapsule(ctypes.CDLL(library).handler)
    jax.ffi.register_ffi_target("jax_softmax_throwing", handler, platform="cpu")
    with support.on_a_cpu():
        call = jax.ffi.ffi_call("jax_softmax_throwing", jax.ShapeDtypeStruct((), np.int32))
        assert call(bad=np.int64(-1)) == 50
        for bad in (0, 7, 49):
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_softmax: range {bad} was thrown"):
                jax.block_until_ready(call(bad=np.int64(bad)))


def test_every_handler_returns_what_it_throws():
    sources = pathlib.Path(__file__).parents[2] / "csrc"
    if not sources.is_dir():
        pytest.skip("needs the sources")
    text = "".join(path.read_text(encoding="utf-8") for path in (sources / "ffi").glob("*.cc"))
    handlers = re.findall(r"DEFINE_HANDLER\w*\(\w+, (\w+)\(", text)
    assert handlers == ["returning_errors"] * text.count("DEFINE_HANDLER") and handlers
