"""A JAX that moved names which it does not promise: what needs them is off, one warning says so, and the rest works."""

import ast
import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jax_softmax
from jax_softmax import _private
from jax_softmax.functions import patching

PLACES = {place: part for part, (_, _, names) in _private.FEATURES.items() for place in names.values()}


def test_this_jax_has_all():
    assert _private.what_is_off() is None


# Each name is taken away in a process that has only just been forked, after JAX was imported and before the package is.
SCRIPT = """
    import os, pkgutil, sys, traceback, warnings
    import jax
    import numpy as np

    resolve = pkgutil.resolve_name

    def without(place):
        def without_one(name):
            if name in place.split(" or "):
                raise AttributeError(name)
            return resolve(name)
        return without_one

    def check():
        import jax_softmax

        x = np.linspace(-3, 3, 15, dtype=np.float32).reshape(3, 5)
        t = np.arange(15, dtype=np.float32).reshape(3, 5)
        for softmax in (jax_softmax.softmax, jax_softmax.fuse(jax_softmax.softmax)):
            y, pullback = jax.jit(lambda x: jax.vjp(softmax, x))(x)
            expected, expected_pullback = jax.vjp(jax.nn.softmax, x)
            np.testing.assert_allclose(y, expected, rtol=1e-5)
            np.testing.assert_allclose(jax.jit(pullback)(t)[0], expected_pullback(t)[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(softmax(x), expected, rtol=1e-5)
        rows = jax.sharding.NamedSharding(jax.make_mesh((2,), ("rows",)), jax.sharding.PartitionSpec("rows"))
        spread = jax.device_put(np.concatenate([x, x[:1]]), rows)
        found = np.asarray(jax.jit(jax_softmax.softmax)(spread))
        np.testing.assert_allclose(found[:3], jax.nn.softmax(x), rtol=1e-5)

    for place, warnings_are in CASES:
        print("====", place, warnings_are, file=sys.stderr, flush=True)
        child = os.fork()
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print("---- status", status, file=sys.stderr, flush=True)
            continue
        try:
            pkgutil.resolve_name = without(place)
            warnings.simplefilter(warnings_are)
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
"""


def test_one_name_is_missing(request):
    places = list(PLACES)[:: 1 if request.config.getoption("--sweeps") else 8]
    cases = list(itertools.product(places, ["always", "error"]))
    command = [sys.executable, "-P", "-c", f"CASES = {cases!r}\n{textwrap.dedent(SCRIPT)}"]
    here = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | here)
    assert result.returncode == 0, result.stderr
    outputs = result.stderr.split("==== ")[1:]
    assert len(outputs) == len(cases), result.stderr
    for (place, warnings_are), output in zip(cases, outputs, strict=True):
        assert output.startswith(f"{place} {warnings_are}\n") and output.endswith("---- status 0\n"), output
        (said,) = re.findall("UserWarning: (.*)", output)
        part = _private.FEATURES[PLACES[place]]
        for words in (place.replace(":", "."), part.off, part.instead, jax.__version__, "A newer jax_softmax"):
            assert words in said, output


# What JAX exports for primitives, in its tutorial on them, in jax.extend and in jax.interpreters.
PUBLIC = {
    "jax.core": {"ShapedArray", "Tracer", "eval_jaxpr"},
    "jax.extend.core": {"ClosedJaxpr", "Jaxpr", "JaxprEqn", "Primitive", "Literal", "Var"},
    "ad": {
        "Zero",
        "add_tangents",
        "instantiate_zeros",
        "is_undefined_primal",
        "primitive_jvps",
        "primitive_transposes",
    },
    "batching": {"fancy_primitive_batchers", "primitive_batchers"},
    "mlir": {"LoweringRuleContext", "lower_fun", "register_lowering"},
}


# And what it documents of programs, equations and types, and of what a lowering rule is given.
PUBLIC_ATTRIBUTES = {
    *("eqns", "invars", "outvars", "constvars", "effects", "jaxpr", "consts", "in_avals", "out_avals", "replace"),
    *("primitive", "params", "aval", "val", "avals_in", "avals_out", "module"),
    *("at", "shape", "dtype", "ndim", "size", "weak_type", "sharding", "update", "to_tangent_aval", "value"),
}
SOURCES = [path for path in sorted(Path(jax_softmax.__file__).parent.rglob("*.py")) if path.name != "_private.py"]


def test_all_other_names_are_public():
    """A private name that is used elsewhere than in the list has no test: put it there."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"jax\._src|(from|import) (jaxlib\.|jax\.experimental)|from jaxlib", text), path
        used = re.findall(r"(?<![\w.])(jax\.core|ad|batching|mlir)\.(\w+)", text)
        for module, names in re.findall(r"^from (jax\.(?:core|extend|interpreters)[\w.]*) import (.*)$", text, re.M):
            if module == "jax.interpreters":
                assert set(names.split(", ")) <= PUBLIC.keys(), path
            else:
                used += [(module, name) for name in names.split(", ")]
        for module, name in used:
            imported = module.startswith("jax.") or re.search(
                rf"^from jax.interpreters import .*\b{module}\b", text, re.M
            )
            assert not imported or name in PUBLIC[module], (path, module, name)


def objects_of_jax():
    """One of each kind that is met where programs are looked at and lowered."""
    closed = jax.make_jaxpr(lambda x: jnp.sum(x) + 1)(np.ones(3, np.float32))
    equation, contexts = closed.jaxpr.eqns[-1], []
    primitive = Primitive("seen")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda ctx, x: contexts.append(ctx) or [x])
    jax.jit(primitive.bind).lower(np.ones(3, np.float32))
    of_program = [closed, closed.jaxpr, closed.jaxpr.debug_info, equation, *equation.invars, equation.invars[0].aval]
    of_equation = [equation.ctx, equation.source_info]
    (ctx,) = contexts
    of_lowering = [ctx, ctx.module_context, ctx.module_context.axis_context]
    context = patching._context
    return [*of_program, *of_equation, *of_lowering, context, getattr(context, "_obj", context)]


def attributes_and_own_names(tree):
    """The attributes that a module reads, with `getattr` and `hasattr` as well, and the names that it defines."""
    read, own = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                read.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]):
                read.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Attribute(attr=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
    return read, own


def test_all_other_attributes_are_public():
    """A private attribute of a JAX object is read in `_private.py` alone, which says what is there without it."""
    found = {path: attributes_and_own_names(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    own = set().union(*(names for _, names in found.values()))
    known = set().union(*map(dir, (np.ndarray, np, jnp, jax, jax.lax, str, dict, list, set, _private.Feature))) | own
    private = (
        {name for a in objects_of_jax() for name in dir(a) if not name.startswith("__")} - PUBLIC_ATTRIBUTES - known
    )
    assert {"ctx", "manager", "source_info", "name_stack", "debug_info", "module_context", "axis_context"} <= private
    assert {path.name: read & private for path, (read, _) in found.items() if read & private} == {}


def test_classes_are_not_told_by_their_names():
    """Nor enumerations by their text, elsewhere than in `_private.py`."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert "__name__" not in text or path.name == "__main__.py", (path, text)
                assert not re.search(r"""['"] (not )?in str\(|str\(.*\) [=!]= ['"]""", text), (path, text)


def test_attributes_that_a_jax_does_not_have():
    class Nothing:
        value = frozenset()

    with _private.context_of(Nothing()):
        pass
    assert _private.without_names(jax.make_jaxpr(jnp.sin)(1.0).jaxpr).eqns
