"""What `fuse` finds as attention in programs, and that the programs compute the same.

What kernels do is done in JAX (`attention_on_host.py`): `test_attention.py` is about the kernels.
"""

import contextlib

import attention_on_host
import emulated
import jax
import jax.export
import jax.numpy as jnp
import pytest
import support
from attention_programs import AGAIN, WHOLE, B, D, H, S, assert_as_exact, check, gradients, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_softmax
from jax_softmax import fuse
from jax_softmax.fusion.attention import visible
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.rewriting import rewritten
from jax_softmax.runtime import cuda

# Of packages that are older than this JAX.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("on_the_cpu")]

try:
    import flax.linen as nn
    from flax import nnx
except ImportError:
    nn = nnx = None
OF_FLAX = "dropout", "dropout that heads share", "nnx", "linen", "float32"


def qkv(heads_of_keys=H):
    return normal(B, S, H, D), normal(B, S, heads_of_keys, D, seed=1), normal(B, S, heads_of_keys, D, seed=2)


def layer(x, w):
    q, k, v = (jnp.einsum("bsf,fhd->bshd", x, w[n]) for n in range(3))
    return x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), None


def scanned(layer, x, w):
    return jax.lax.scan(layer, x, w)[0]


def by_hand(q, k, v):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4
    scores = jnp.where(jnp.tri(S, dtype=bool), 30 * jnp.tanh(scores / 30), -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores).astype(v.dtype), v)


def widened(q, k, v, weights=jnp.float32, **options):
    """In float32 from queries and keys to the weights, or to the output."""
    q, k = q.astype(jnp.float32) / jnp.sqrt(jnp.float32(D)), k.astype(jnp.float32) * 0.5
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, **options)
    y = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool), scores, -1e30)).astype(weights)
    return jnp.einsum("bhij,bjhd->bihd", y, v.astype(weights)).astype(v.dtype)


def divided_later(q, k, v, stop=False):
    """As MaxText has it: exponentials relative to rows' maxima, and the product is divided by their sums."""
    grouped = q.reshape(B, S, k.shape[2], -1, D)
    scores = jnp.einsum("bikgd,bjkd->bkgij", grouped, k) / 4
    scores = (scores + jnp.where(jnp.tri(S, dtype=bool), 0, -1e30).astype(scores.dtype)).reshape(B, H, S, S)
    largest = jnp.max(jax.lax.stop_gradient(scores) if stop else scores, -1, keepdims=True)
    e = jnp.exp(scores - largest)
    total = jnp.swapaxes(jnp.sum(e, -1, keepdims=True), 1, 2)
    o = jnp.einsum("bkgij,bjkd->bikgd", e.reshape(B, k.shape[2], -1, S, S), v)
    return o.reshape(q.shape) / total


def rotated(x):
    """By positions, whose angles are a product of float32 indices."""
    angles = jnp.einsum("s,d->sd", jnp.arange(S, dtype=jnp.float32), 0.1 ** jnp.arange(D // 2, dtype=jnp.float32))
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def of_gemma_2(q, k, v):
    """As MaxText has Gemma 2's: widened queries and keys, a cap, and sums that are rounded before they divide."""
    grouped = q.astype(jnp.float32).reshape(B, S, k.shape[2], -1, D)
    scores = 50 * jnp.tanh(jnp.einsum("bikgd,bjkd->bkgij", grouped, k.astype(jnp.float32)) / 50)
    scores = jnp.where(jnp.tri(S, dtype=bool), scores, -0.7 * float(jnp.finfo(jnp.float32).max))
    e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    sums = jnp.moveaxis(jnp.sum(e, -1, keepdims=True), 3, 1).reshape(B, S, H, 1)
    o = jnp.einsum("bkgij,bjkd->bikgd", e.astype(v.dtype), v).reshape(B, S, H, D)
    return o / sums.astype(o.dtype)


def written_out(q, k, v):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4
    e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    return jnp.einsum("bhij,bjhd->bihd", (e / jnp.sum(e, -1, keepdims=True)).astype(v.dtype), v)


def added_mask(q, k, v):
    mask = jnp.where(jnp.tri(S, dtype=bool), 0, -1e9).astype(jnp.float32)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4 + mask
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores).astype(v.dtype), v)


def masked_softmax(q, k, v):
    lengths = jnp.array([S, S // 2])
    weights = jax.nn.softmax(
        jnp.einsum("bihd,bjhd->bhij", q, k) / 4, where=(jnp.arange(S) < lengths[:, None])[:, None, None]
    )
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def heads_first(q, k, v):
    q, k, v = (a.transpose(0, 2, 1, 3).reshape(B * H, S, D) for a in (q, k, v))
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / 4)
    return (weights @ v).reshape(B, H, S, D).transpose(0, 2, 1, 3)


def batch_of_one(q, k, v):
    """`jnp.matmul` takes dimensions of extent 1 away before a product."""
    q, k, v = (a[:1].swapaxes(1, 2) for a in (q, k, v))
    return jax.nn.softmax(q @ k.swapaxes(2, 3) / 4) @ v


def one_sequence(q, k, v):
    return jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T) @ v[0, :, 0]


def with_weights(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k))
    return jnp.concatenate([jnp.einsum("bhij,bjhd->bihd", weights, v).ravel(), weights.ravel()])


def repeated(q, k, v):
    return jax.nn.dot_product_attention(q, *(jnp.repeat(a, H // 2, 2) for a in (k, v)))


def dropped(q, k, v, broadcast=False):
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.2, "broadcast_dropout": broadcast}
    return nn.dot_product_attention(q, k, v, **options)


def with_sink(q, k, v, sink):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / 4
    scores = jnp.where(jnp.tri(S, dtype=bool), scores, jnp.finfo(scores.dtype).min)
    column = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def sink_of_softmax(q, k, v, sink):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / 4
    weights = jax_softmax.softmax(scores, where=jnp.tri(S, dtype=bool), sink=sink[:, None, None])
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def nnx_layer(x):
    layer = nnx.MultiHeadAttention(H, H * D, decode=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return layer(x, mask=nnx.make_causal_mask(x[..., 0]))


def linen_layer(x, dtype=jnp.bfloat16):
    module = nn.MultiHeadDotProductAttention(H, dtype=dtype)
    return module.apply(module.init(jax.random.key(0), x), x)


jax_nn = jax.nn.dot_product_attention
BIAS = normal(1, H, S, S, seed=3)
X, SINK = normal(B, S, H * D), normal(H, seed=5)
LAYERS = normal(3, 3, H * D, H, D, seed=4) / 8
# The program, its operands, which kernels it calls.
PROGRAMS = {
    "jax.nn": (lambda *a: gradients(jax_nn, *a), qkv(), WHOLE),
    "output alone": (jax_nn, qkv(), "forward"),
    "causal": (lambda *a: gradients(lambda q, k, v: jax_nn(q, k, v, is_causal=True), *a), qkv(), WHOLE),
    "window": (lambda *a: gradients(lambda q, k, v: jax_nn(q, k, v, local_window_size=(8, 0)), *a), qkv(), WHOLE),
    "grouped": (lambda *a: gradients(lambda q, k, v: jax_nn(q, k, v, is_causal=True), *a), qkv(2), WHOLE),
    "repeated keys": (lambda *a: gradients(repeated, *a), qkv(2), WHOLE),
    "lengths": (
        lambda n, *a: gradients(lambda q, k, v: jax_nn(q, k, v, key_value_seq_lengths=n), *a),
        (jnp.array([S, 20], jnp.int32), *qkv()),
        WHOLE,
    ),
    "bias": (lambda *a: gradients(lambda q, k, v, bias: jax_nn(q, k, v, bias), *a), (*qkv(), BIAS), WHOLE + " scores"),
    "bias, constant": (
        lambda bias, *a: gradients(lambda q, k, v: jax_nn(q, k, v, bias, is_causal=True), *a),
        (BIAS, *qkv()),
        WHOLE,
    ),
    "keys alone": (lambda q, *a: gradients(lambda k, v: jax_nn(q, k, v), *a), qkv(), "forward keys"),
    "by hand": (lambda *a: gradients(by_hand, *a), qkv(), WHOLE),
    "widened": (lambda *a: gradients(widened, *a), qkv(), WHOLE),
    "widened until the weights": (lambda *a: gradients(lambda *a: widened(*a, weights=a[2].dtype), *a), qkv(), WHOLE),
    "widened, checkpoint": (lambda *a: gradients(jax.checkpoint(widened), *a), qkv(), AGAIN),
    "widened, repeated keys, output alone": (
        lambda q, *kv: widened(q, *(jnp.repeat(a.astype(jnp.float32), 2, axis=2) for a in kv)).astype(q.dtype),
        qkv(2),
        "forward",
    ),
    "rotated": (lambda *a: gradients(lambda q, k, v: jax_nn(rotated(q), rotated(k), v), *a), qkv(), WHOLE),
    "of Gemma 2": (lambda *a: gradients(of_gemma_2, *a), qkv(2), WHOLE),
    "widened, output alone, exact": (lambda *a: widened(*a, weights=a[2].dtype, precision="highest"), qkv(), "forward"),
    "written out": (lambda *a: gradients(written_out, *a), qkv(), WHOLE),
    "divided later": (lambda *a: gradients(divided_later, *a), qkv(), WHOLE),
    "divided later, grouped": (lambda *a: gradients(divided_later, *a), qkv(2), WHOLE),
    "divided later, output alone": (divided_later, qkv(2), "forward"),
    "divided later, by a constant maximum": (
        lambda *a: gradients(lambda *a: divided_later(*a, True), *a),
        qkv(),
        WHOLE,
    ),
    "divided later, checkpoint": (lambda *a: gradients(jax.checkpoint(divided_later), *a), qkv(), AGAIN),
    "added mask": (lambda *a: gradients(added_mask, *a), qkv(), WHOLE),
    "softmax with a mask": (lambda *a: gradients(masked_softmax, *a), qkv(), WHOLE),
    "heads first": (lambda *a: gradients(heads_first, *a), qkv(), WHOLE),
    "batch of one": (lambda *a: gradients(batch_of_one, *a), qkv(), WHOLE),
    "one sequence": (lambda *a: gradients(one_sequence, *a), qkv(), WHOLE),
    "dropout": (lambda *a: gradients(dropped, *a), qkv(), WHOLE),
    "dropout that heads share": (lambda *a: gradients(lambda *a: dropped(*a, True), *a), qkv(), WHOLE),
    "sink": (lambda *a: gradients(with_sink, *a), (*qkv(), SINK), WHOLE),
    "sink of softmax": (lambda *a: gradients(sink_of_softmax, *a), (*qkv(), SINK), WHOLE),
    "sink, constant": (
        lambda sink, *a: gradients(lambda q, k, v: with_sink(q, k, v, sink), *a),
        (SINK, *qkv()),
        WHOLE,
    ),
    "sink, output alone": (with_sink, (*qkv(), SINK), "forward"),
    "nnx": (lambda *a: gradients(nnx_layer, *a), (X,), WHOLE),
    "linen": (lambda *a: gradients(linen_layer, *a), (X,), WHOLE),
    "checkpoint": (lambda *a: gradients(jax.checkpoint(jax_nn), *a), qkv(), AGAIN),
    "vmap": (lambda *a: gradients(jax.vmap(lambda q, k, v: jax_nn(q, k, v, is_causal=True)), *a), qkv(), WHOLE),
    "scan": (lambda *a: gradients(lambda x, w: scanned(layer, x, w), *a), (X, LAYERS), AGAIN),
    "scan of checkpoint": (
        lambda *a: gradients(lambda x, w: scanned(jax.checkpoint(layer), x, w), *a),
        (X, LAYERS),
        AGAIN,
    ),
    "widened float16": (lambda *a: gradients(widened, *a), tuple(a.astype(jnp.float16) for a in qkv()), WHOLE),
    "float32": (lambda *a: gradients(lambda x: linen_layer(x, jnp.float32), *a), (X,), WHOLE),
    "forward mode": (lambda *a: jax.jvp(jax_nn, a, a), qkv(), "tangents"),
    # What stays as it was.
    "exact float32": (
        lambda *a: gradients(jax.default_matmul_precision("highest")(jax_nn), *a),
        tuple(a.astype(jnp.float32) for a in qkv()),
        "",
    ),
    "weights are a result": (lambda *a: gradients(with_weights, *a), qkv(), ""),
    "widened, exact": (lambda *a: gradients(lambda *a: widened(*a, precision="highest"), *a), qkv(), ""),
    "second derivative": (lambda *a: gradients(jax.grad(lambda *a: jax_nn(*a).sum()), *a), qkv(), ""),
}


# Others say nearly the same: they run with --sweeps alone.
ALIKE = {
    "added mask",
    "bias",
    "bias, constant",
    "by hand",
    "causal",
    "checkpoint",
    "divided later",
    "divided later, by a constant maximum",
    "divided later, checkpoint",
    "divided later, output alone",
    "dropout that heads share",
    "heads first",
    "jax.nn",
    "linen",
    "repeated keys",
    "scan of checkpoint",
    "sink of softmax",
    "sink, constant",
    "sink, output alone",
    "softmax with a mask",
    "widened until the weights",
    "widened, checkpoint",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep) if name in ALIKE else name for name in PROGRAMS]
)
def test_is_found(name):
    if name in OF_FLAX and nn is None:
        pytest.skip("needs Flax")
    program, operands, kernels = PROGRAMS[name]
    assert_as_exact(check(fuse(program), operands, kernels), program, operands)


@pytest.mark.parametrize("attend", [jax_nn, by_hand, *[dropped] * bool(nn)])
def test_the_derivative_of_what_is_fused(attend):
    """The weights are made again, not kept."""
    found = check(lambda *a: gradients(fuse(attend), *a), qkv(), AGAIN)
    assert_as_exact(found, lambda *a: gradients(attend, *a), qkv())


def test_products_beside_attention_stay_as_they_are():
    """Those of widened arrays, which are 16-bit products only where a kernel makes them."""
    q, k, v = qkv()

    def beside(q, k, v):
        return widened(q, k, v), jnp.einsum("bihd,bjhd->bhij", q.astype(jnp.float32) / 3, k.astype(jnp.float32))

    with emulated.kernels(attention=True):
        eqns = rewritten(jax.make_jaxpr(beside)(q, k, v).jaxpr).eqns
    (product,) = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert [a.aval.dtype for a in product.invars] == [jnp.float32, jnp.float32]
    assert sum(eqn.primitive is attention_p for eqn in eqns) == 1


def test_scans_stack_no_weights():
    program = fuse(lambda *a: gradients(lambda x, w: scanned(layer, x, w), *a))
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True):
        text = jax.jit(program).lower(X, LAYERS).as_text()
    assert f"3x{B}x{H}x{S}x{S}" not in text and f"3x1x{B}x{H}x{S}x{S}" not in text


def test_loops_have_no_masks_in_full_size():
    def layer(x, w):
        return x + by_hand_of(2048)(*jnp.moveaxis((x @ w).reshape(8, 2048, 3, 16, 64), 2, 0)).reshape(x.shape), None

    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 2048, 1024), (4, 1024, 3072))]
    text = lowered(lambda *a: gradients(lambda x, w: scanned(layer, x, w), *a), *operands).as_text()
    assert "jax_softmax_attention" in text and "16x2048x2048" not in text


def test_explain_says_so():
    operands = [jax.ShapeDtypeStruct((8, 2048, 16, 64), jnp.bfloat16)] * 3
    report = fuse(lambda *a: gradients(by_hand_of(2048), *a)).explain(*operands)
    assert [line.op for line in report] == ["attention"]
    title = "attention of float32[8, 16, 2048, 2048]: by its kernels: 2.00 GiB of weights are never in memory"
    assert str(report).split("\n") == [title, "  along (3,)"]


def by_hand_of(n):
    def attend(q, k, v):
        scores = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4
        weights = jax.nn.softmax(jnp.where(jnp.tri(n, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)

    return attend


@pytest.mark.parametrize(
    "shape,is_found",
    [((8, 2048, 16, 64), True), ((4, 4096, 16, 128), True), ((1, 64, 1, 64), False), ((8, 32, 16, 64), False)],
)
def test_short_sequences_stay_as_they_are(shape, is_found):
    """Who is faster is a matter of tiles, bytes and how many blocks there are."""
    report = fuse(by_hand_of(shape[1])).explain(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3)
    assert [line.op == "attention" for line in report] == [is_found]


def with_largest(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k))
    return jnp.einsum("bhij,bjhd->bihd", weights, v), weights.max()


@pytest.mark.parametrize(
    "program,length,dtype,reason",
    [
        (with_largest, 2048, "bfloat16", "something else reads the scores or the weights"),
        (
            jax.default_matmul_precision("highest")(jax_nn),
            *(2048, "float32", "products of float32 are asked to be more precise than TF32"),
        ),
        (jax_nn, 32, "bfloat16", "its kernels would take longer: "),
    ],
)
def test_explain_says_why_not(program, length, dtype, reason):
    operand = jax.ShapeDtypeStruct((8, length, 16, 64), dtype)
    assert f"not attention: {reason}" in str(fuse(program).explain(operand, operand, operand))


def test_is_exported():
    operands = [jax.ShapeDtypeStruct((8, 2048, 16, 64), jnp.bfloat16)] * 3
    options = {"disabled_checks": jax_softmax.export_checks()}
    for platforms in (["cuda"], ["cpu", "cuda"]):
        program = jax.jit(fuse(lambda *a: gradients(by_hand_of(2048), *a)))
        exported = jax.export.export(program, platforms=platforms, **options)(*operands)
        assert "jax_softmax_attention" in jax.export.deserialize(exported.serialize()).mlir_module()


def test_older_chips_run_the_program(monkeypatch):
    class Turing:
        platform, compute_capability = "gpu", "7.5"

    monkeypatch.setattr(jax, "local_devices", lambda: [Turing()])
    monkeypatch.setattr(cuda, "availability", lambda: None)
    operands = [jax.ShapeDtypeStruct((8, 2048, 16, 64), jnp.bfloat16)] * 3
    assert "attention" not in {line.op for line in fuse(by_hand_of(2048)).explain(*operands)}


def test_a_program_without_our_operators_is_not_lowered_instead():
    """Where attention is all that is found, the program of jax.nn is not the faster one."""
    operands = [jnp.ones((8, 512, 16, 64), jnp.bfloat16)] * 3
    lowered = jax.jit(fuse(jax_nn)).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "jax_softmax_attention" in lowered.as_text()
    assert jax_softmax.fuse(jax_nn)(*operands).shape == operands[0].shape  # here, too


def lowered(f, *operands):
    return jax.jit(fuse(f)).trace(*operands).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("around", ["map of the gradient", "gradient of the map"])
def test_scans_in_shard_map(around):
    mesh = support.mesh_of_cpus((4, 2), AxisType.Auto)

    def mapped(f, out_specs):
        return jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=out_specs)

    x = normal(8, S, H * D)

    def loss(x, w):
        return scanned(layer, x, w).astype(jnp.float32).sum()

    if around == "map of the gradient":
        f = mapped(jax.grad(loss), P("data"))
    else:
        f = jax.grad(lambda x, w: mapped(lambda x, w: scanned(layer, x, w), P("data"))(x, w).astype(jnp.float32).sum())
    lowered(f, x, LAYERS)


def test_scans_with_literals_and_in_chains():
    def masked(w, xs, scale, mask):
        mask = jnp.broadcast_to(mask, (64, 64))
        return jax.lax.scan(lambda c, x: (c + x, jax.nn.softmax(jnp.where(mask, (c @ w) * scale, -1e9))), xs[0], xs)

    operands = jnp.ones((64, 64)), jnp.ones((3, 64, 64)), jnp.ones((64,), bool)
    lowered(lambda w, xs, mask: jax.jit(masked)(w, xs, 0.5, mask), *operands)

    def chain(x, c):
        for _ in range(3):
            c, x = jax.lax.scan(lambda c, x: (y := layer((c + x)[None], LAYERS[0])[0][0], y), c, x)
        return c

    lowered(lambda x, c: gradients(chain, x, c), normal(3, S, H * D), normal(S, H * D))


@pytest.mark.parametrize("setting", ["transfers", "infinities", "no CPU"])
def test_settings_do_not_matter(setting, monkeypatch):
    operands = [jax.ShapeDtypeStruct((8, 2048, 16, 64), jnp.bfloat16)] * 3
    contexts = {"transfers": lambda: jax.transfer_guard("disallow"), "infinities": lambda: jax.debug_infs(True)}
    if setting == "no CPU":
        devices = jax.local_devices

        def without_cpu(backend=None):
            if backend == "cpu":
                raise RuntimeError("Unknown backend cpu")
            return devices()

        monkeypatch.setattr(jax, "local_devices", without_cpu)
    with contexts.get(setting, contextlib.nullcontext)():
        visible.Visible.part.cache_clear()
        assert "attention" in lowered(by_hand_of(2048), *operands).as_text()
    visible.Visible.part.cache_clear()
