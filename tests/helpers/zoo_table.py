"""What zoo.py cannot guess of JAX's functions: calls by hand, and what is no part of a program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

N = 8  # rows and columns


# ---- Arguments, made of rows of probabilities p; k, how many come before, makes them differ


def square(p, k=0):
    return jnp.roll(p, k, axis=0)


def row(p, k=0):
    return p[k % N]


def regular(p, k=0):
    """A matrix that has an inverse."""
    return square(p, k) + (2 + k) * jnp.eye(N)


def positive_definite(p, k=0):
    return p @ p.T + (1 + k) * jnp.eye(N)


def integers(p=None, k=0):
    return jnp.asarray((np.arange(N * N).reshape(N, N) * 5 + k) % N, jnp.int32)


def integer_row(p=None, k=0):
    return jnp.asarray((np.arange(N) * 3 + k) % N, jnp.int32)


def truths(p=None, k=0):
    return integers(p, k) % 2 == 0


def truth_row(p=None, k=0):
    return integer_row(p, k) % 2 == 0


def key(p=None, k=0):
    return jax.random.key(k)


def batched(p, k=0):
    """Images: one of four channels."""
    return square(p, k).reshape(1, 4, 4, 4)


def over_axis(f):
    """f of each row, the rows being those of an axis with the name i."""
    return lambda p: jax.vmap(f, axis_name="i")(p)


def in_shard_map(f):
    """f of all rows, on a mesh of one device."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


def sparse(p, k=0):
    return jax.experimental.sparse.BCOO.fromdense(square(p, k), nse=N * N)


def sparse_rows(p, k=0):
    return jax.experimental.sparse.BCSR.fromdense(square(p, k), nse=N * N)


def coordinates(p):
    """The indices of all elements, each a column, and the elements."""
    return jnp.stack(jnp.meshgrid(jnp.arange(N), jnp.arange(N), indexing="ij"), -1).reshape(-1, 2), p.ravel()


def row_pointers():
    return jnp.arange(N + 1) * N


def columns():
    return jnp.tile(jnp.arange(N), N)


def newton(f, start):
    def body(x):
        return x - f(x) / jax.jvp(f, (x,), (jnp.ones_like(x),))[1]

    return lax.fori_loop(0, 6, lambda _, x: body(x), start)


def compositely(p):
    return lax.composite(lambda x: jnp.sin(x) * 2, name="zoo.twice_the_sine")(p)


def in_steps(p, body):
    return lax.scan(body, p[0], p)


MATRIX_PRODUCT = (((1,), (0,)), ((), ()))
ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
TO_ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
SOME = np.array([[1], [4], [6]])


def scattered(scatter):
    return lambda p: scatter(p, SOME, 2 + square(p, 2)[:3], TO_ROWS, unique_indices=True)


def quaternions(p, k=0):
    return jax.scipy.spatial.transform.Rotation.from_quat(square(p, k)[:, :4])


# Calls of which `jax.jit` takes none that a signature gives. They look the functions up when they are called: not every
# JAX has them.
NUMPY = {
    "apply_over_axes": lambda p: jnp.apply_over_axes(jnp.sum, p, [0]),
    "arange": lambda p: jnp.arange(N) * p,
    "choose": lambda p: jnp.choose(integer_row() % 3, [p[0], p[1], p[2]], mode="clip"),
    "clip": lambda p: jnp.clip(p, 0.1, square(p, 1)),
    "cross": lambda p: jnp.cross(p[:, :3], square(p, 1)[:, :3]),
    "delete": lambda p: jnp.delete(p, 2, axis=0),
    "einsum": lambda p: jnp.einsum("ij,kj->ik", p, square(p, 1)),
    "fill_diagonal": lambda p: jnp.fill_diagonal(p, 2.0, inplace=False),
    "from_dlpack": lambda p: p + jnp.from_dlpack(np.ones(N, np.float32)),
    "frombuffer": lambda p: p + jnp.frombuffer(bytes(4 * N), "float32"),
    "frompyfunc": lambda p: jnp.frompyfunc(lambda a, b: a * b + a, 2, 1)(p, p[0]),
    "fromstring": lambda p: p + jnp.fromstring("1 2 3 4 5 6 7 8", sep=" "),
    "mask_indices": lambda p: p[jnp.mask_indices(N, jnp.triu, size=N * (N + 1) // 2)],
    "place": lambda p: jnp.place(p, truths(), row(p), inplace=False),
    "polyfit": lambda p: jnp.polyfit(jnp.arange(float(N)), p[0], 2),
    "put": lambda p: jnp.put(p, integer_row(), row(p), inplace=False),
    "put_along_axis": lambda p: jnp.put_along_axis(p, integers(), 2 * p, 1, inplace=False),
    "ravel_multi_index": lambda p: jnp.ravel_multi_index((integer_row(), integer_row(k=1)), (N, N), mode="clip"),
    "ufunc": lambda p: jnp.ufunc(lambda a, b: a * b + a, 2, 1)(p, p[0]),
    "vectorize": lambda p: jnp.vectorize(jnp.dot, signature="(n),(n)->()")(p, row(p)),
    "histogramdd": lambda p: jnp.histogramdd(p[:, :2], bins=4),
    "roots": lambda p: jnp.roots(p[0], strip_zeros=False),
    "linalg.tensorsolve": lambda p: jnp.linalg.tensorsolve(regular(p), row(p)),
    "linalg.cross": lambda p: jnp.linalg.cross(p[:, :3], square(p, 1)[:, :3]),
}
LOOPS = {
    "associative_scan": lambda p: lax.associative_scan(jnp.multiply, 1 + p),
    "cond": lambda p: lax.cond(p[0, 0] < 0.5, jnp.sin, lambda a: a * a, p),
    "custom_linear_solve": lambda p: lax.custom_linear_solve(
        lambda v: regular(p) @ v, p[0], lambda f, b: jnp.linalg.solve(regular(p), b), lambda f, b: b @ regular(p)
    ),
    "custom_root": lambda p: lax.custom_root(
        lambda x: x**3 + x - p[0], 0.5 + p[1], newton, lambda g, y: y / g(jnp.ones_like(y))
    ),
    "fori_loop": lambda p: lax.fori_loop(0, 3, lambda k, a: jnp.sin(a) + k, p),
    "map": lambda p: lax.map(lambda a: jnp.sin(a) * a, p),
    "platform_dependent": lambda p: lax.platform_dependent(p, cpu=jnp.sin, default=jnp.sin),
    "scan": lambda p: in_steps(p, lambda a, b: (jnp.tanh(a * b) + b, a.sum())),
    "switch": lambda p: lax.switch(integer_row()[1], [jnp.sin, jnp.cos, lambda a: a * a, jnp.tanh], p),
    "while_loop": lambda p: lax.while_loop(lambda a: a.sum() < 50, lambda a: 2 * a, p),
    "composite": compositely,
    "reduce": lambda p: lax.reduce(p, np.float32(0), lax.add, (1,)),
    "reduce_window": lambda p: lax.reduce_window(p, np.float32(0), lax.add, (2, 2), (1, 1), "VALID"),
}
COLLECTIVES = {
    "all_gather": over_axis(lambda a: lax.all_gather(a, "i")),
    "all_to_all": over_axis(lambda a: lax.all_to_all(a, "i", 0, 0)),
    "axis_index": over_axis(lambda a: lax.axis_index("i") * a),
    "axis_size": over_axis(lambda a: lax.axis_size("i") * a),
    "pmax": over_axis(lambda a: lax.pmax(a, "i")),
    "pmean": over_axis(lambda a: a - lax.pmean(a, "i")),
    "pmin": over_axis(lambda a: lax.pmin(a, "i")),
    "ppermute": over_axis(lambda a: lax.ppermute(a, "i", [(k, (k + 1) % N) for k in range(N)])),
    "pshuffle": over_axis(lambda a: lax.pshuffle(a, "i", [*range(1, N), 0])),
    "psum": over_axis(lambda a: a / lax.psum(a, "i")),
    "psum_scatter": over_axis(lambda a: lax.psum_scatter(a, "i")),
    "pswapaxes": over_axis(lambda a: lax.pswapaxes(a, "i", 0)),
}
SHARED = {
    "all_gather_invariant": in_shard_map(lambda a: lax.all_gather_invariant(a, "i")),
    "pcast": in_shard_map(lambda a: lax.pcast(jnp.ones(N), "i", to="varying") * a),
    "pvary": in_shard_map(lambda a: lax.pvary(jnp.ones(N), "i") * a),
}
LAX = {
    "argmax": lambda p: lax.argmax(p, 1, np.int32),
    "argmin": lambda p: lax.argmin(p, 1, np.int32),
    "broadcast_in_dim": lambda p: lax.broadcast_in_dim(p, (2, N, N), (1, 2)),
    "clamp": lambda p: lax.clamp(0.1, p, 0.2),
    "conv_general_dilated": lambda p: lax.conv_general_dilated(batched(p), batched(p, 1), (1, 1), "SAME"),
    "conv_general_dilated_local": lambda p: lax.conv_general_dilated_local(
        batched(p), p.reshape(1, 4, 4, 4), (1, 1), "VALID", (1, 1)
    ),
    "conv_general_dilated_patches": lambda p: lax.conv_general_dilated_patches(batched(p), (2, 2), (1, 1), "VALID"),
    "conv_with_general_padding": lambda p: lax.conv_with_general_padding(
        batched(p), batched(p, 1), (1, 1), "SAME", None, None
    ),
    "dot_general": lambda p: lax.dot_general(p, square(p, 1), MATRIX_PRODUCT),
    "dynamic_index_in_dim": lambda p: lax.dynamic_index_in_dim(p, integer_row()[1]),
    "dynamic_slice": lambda p: lax.dynamic_slice(p, (integer_row()[1], 0), (4, 4)),
    "dynamic_update_index_in_dim": lambda p: lax.dynamic_update_index_in_dim(p, 2 * p[0], integer_row()[1], 0),
    "dynamic_update_slice": lambda p: lax.dynamic_update_slice(p, 2 * p[:2, :2], (integer_row()[1], 0)),
    "fft": lambda p: lax.fft(p.astype("complex64"), "fft", (N,)),
    "gather": lambda p: lax.gather(p, SOME, ROWS, (1, N)),
    "index_in_dim": lambda p: lax.index_in_dim(p, 2),
    "index_take": lambda p: lax.index_take(p, integer_row()[None], (0,)),
    "integer_pow": lambda p: lax.integer_pow(p, 3),
    "iota": lambda p: lax.iota("float32", N) * p,
    "pad": lambda p: lax.pad(p, p[0, 0], ((1, 2, 0), (0, 1, 1))),
    "polygamma": lambda p: lax.polygamma(jnp.ones_like(p), 1 + p),
    "ragged_dot": lambda p: lax.ragged_dot(p, jnp.stack([p, 2 * p]), jnp.array([3, N - 3])),
    "ragged_dot_general": lambda p: lax.ragged_dot_general(
        p,
        jnp.stack([p, 2 * p]),
        jnp.array([3, N - 3]),
        lax.RaggedDotDimensionNumbers(MATRIX_PRODUCT_OF_GROUPS, [0], [0]),
    ),
    "rng_bit_generator": lambda p: lax.rng_bit_generator(jnp.arange(4, dtype="uint32"), (N,)),
    "squeeze": lambda p: lax.squeeze(p[:, None], (1,)),
    "scatter": scattered(lambda *a, **o: lax.scatter(*a, **o)),
    "scatter_add": scattered(lambda *a, **o: lax.scatter_add(*a, **o)),
    "scatter_max": scattered(lambda *a, **o: lax.scatter_max(*a, **o)),
    "scatter_min": scattered(lambda *a, **o: lax.scatter_min(*a, **o)),
    "scatter_mul": scattered(lambda *a, **o: lax.scatter_mul(*a, **o)),
    "scatter_sub": scattered(lambda *a, **o: lax.scatter_sub(*a, **o)),
    "scatter_apply": lambda p: lax.scatter_apply(p, SOME, jnp.sin, TO_ROWS, update_shape=(3, N), unique_indices=True),
    "top_k": lambda p: lax.top_k(p, 3),
    "with_sharding_constraint": lambda p: lax.with_sharding_constraint(
        p, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    "linalg.cholesky_update": lambda p: lax.linalg.cholesky_update(
        jnp.linalg.cholesky(positive_definite(p), upper=True), p[0]
    ),
    "linalg.householder_product": lambda p: lax.linalg.householder_product(regular(p), 0.1 * p[0]),
    "linalg.ormqr": lambda p: lax.linalg.ormqr(regular(p), 0.1 * p[0], square(p, 1)),
    "linalg.tridiagonal_solve": lambda p: lax.linalg.tridiagonal_solve(
        p[0].at[0].set(0), 3 + p[1], p[2].at[-1].set(0), p
    ),
}
MATRIX_PRODUCT_OF_GROUPS = (((1,), (1,)), ((), ()))
SPARSE = {
    "BCOO": lambda p: jsp().BCOO((p.ravel(), coordinates(p)[0]), shape=(N, N)) @ p,
    "BCSR": lambda p: jsp().BCSR((p.ravel(), columns(), row_pointers()), shape=(N, N)) @ p,
    "COO": lambda p: jsp().COO((p.ravel(), *coordinates(p)[0].T), shape=(N, N)) @ p,
    "CSC": lambda p: jsp().CSC((p.ravel(), columns(), row_pointers()), shape=(N, N)) @ p,
    "CSR": lambda p: jsp().CSR((p.ravel(), columns(), row_pointers()), shape=(N, N)) @ p,
    "bcoo_broadcast_in_dim": lambda p: jsp().bcoo_broadcast_in_dim(
        sparse(p), shape=(2, N, N), broadcast_dimensions=(1, 2)
    ),
    "bcoo_concatenate": lambda p: jsp().bcoo_concatenate([sparse(p), sparse(p, 1)], dimension=0),
    "bcoo_conv_general_dilated": lambda p: jsp().bcoo_conv_general_dilated(
        jsp().BCOO.fromdense(p[:1, None], nse=N, n_batch=0), p[1:2, None, :3], window_strides=(1,), padding="SAME"
    ),
    "bcoo_dot_general": lambda p: jsp().bcoo_dot_general(sparse(p), p, dimension_numbers=MATRIX_PRODUCT),
    "bcoo_dot_general_sampled": lambda p: jsp().bcoo_dot_general_sampled(
        p, square(p, 1), coordinates(p)[0], dimension_numbers=MATRIX_PRODUCT
    ),
    "bcoo_extract": lambda p: jsp().bcoo_extract(sparse(p), square(p, 1)),
    "bcoo_gather": lambda p: jsp().bcoo_gather(sparse(p), SOME, ROWS, (1, N)),
    "bcoo_multiply_dense": lambda p: jsp().bcoo_multiply_dense(sparse(p), square(p, 1)),
    "bcoo_squeeze": lambda p: jsp().bcoo_squeeze(jsp().BCOO.fromdense(p[:, None], nse=N * N), dimensions=(1,)),
    "bcsr_broadcast_in_dim": lambda p: jsp().bcsr_broadcast_in_dim(
        sparse_rows(p), shape=(2, N, N), broadcast_dimensions=(1, 2)
    ),
    "bcsr_concatenate": lambda p: jsp().bcsr_concatenate([sparse_rows(p), sparse_rows(p, 1)], dimension=0),
    "bcsr_dot_general": lambda p: jsp().bcsr_dot_general(sparse_rows(p), p, dimension_numbers=MATRIX_PRODUCT),
    "bcsr_extract": lambda p: jsp().bcsr_extract(columns(), row_pointers(), p),
    "coo_matmat": lambda p: jsp().coo_matmat(jsp().coo_fromdense(p, nse=N * N), p),
    "coo_matvec": lambda p: jsp().coo_matvec(jsp().coo_fromdense(p, nse=N * N), p[0]),
    "coo_todense": lambda p: jsp().coo_todense(jsp().coo_fromdense(p, nse=N * N)),
    "csr_matmat": lambda p: jsp().csr_matmat(jsp().csr_fromdense(p, nse=N * N), p),
    "csr_matvec": lambda p: jsp().csr_matvec(jsp().csr_fromdense(p, nse=N * N), p[0]),
    "csr_todense": lambda p: jsp().csr_todense(jsp().csr_fromdense(p, nse=N * N)),
    "grad": lambda p: jsp().grad(lambda a: (a @ p).sum())(sparse(p)),
    "value_and_grad": lambda p: jsp().value_and_grad(lambda a: (a @ p).sum())(sparse(p)),
}
OTHERS = {
    "numpy.array": lambda p: jnp.array(p),
    "nn.dot_product_attention": lambda p: jax.nn.dot_product_attention(
        *(square(p, k).reshape(1, N, 2, 4) for k in range(3))
    ),
    "nn.one_hot": lambda p: jax.nn.one_hot(integer_row(), N) * p,
    "nn.initializers.delta_orthogonal": lambda p: jax.nn.initializers.delta_orthogonal()(key(), (3, N, N)),
    "nn.initializers.constant": lambda p: jax.nn.initializers.constant(2.0)(key(), (N, N)) * p,
    "nn.initializers.variance_scaling": lambda p: jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")(
        key(), (N, N)
    ),
    "random.categorical": lambda p: jax.random.categorical(key(), jnp.log(p)),
    "random.choice": lambda p: jax.random.choice(key(), N, (4,), p=p[0]),
    "random.triangular": lambda p: jax.random.triangular(key(), 0 * p, p, 1 + p),
    "random.wrap_key_data": lambda p: jax.random.uniform(jax.random.wrap_key_data(jnp.array([1, 2], "uint32"))) * p,
    "image.scale_and_translate": lambda p: jax.image.scale_and_translate(
        p, (4, 12), (0, 1), 1 + p[0, :2], p[1, :2], "linear"
    ),
    "scipy.interpolate.RegularGridInterpolator": lambda p: jax.scipy.interpolate.RegularGridInterpolator(
        (jnp.arange(N), jnp.arange(N)), p
    )(p[:, :2] * 3),
    "scipy.linalg.cho_solve": lambda p: jax.scipy.linalg.cho_solve(
        jax.scipy.linalg.cho_factor(positive_definite(p)), p
    ),
    "scipy.linalg.eigh_tridiagonal": lambda p: jax.scipy.linalg.eigh_tridiagonal(p[0], p[1, :-1], eigvals_only=True),
    "scipy.linalg.funm": lambda p: jax.scipy.linalg.funm(p, jnp.sin),
    "scipy.linalg.leslie": lambda p: jax.scipy.linalg.leslie(p[0], p[1, :-1]),
    "scipy.linalg.lu_solve": lambda p: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(regular(p)), p),
    "scipy.linalg.toeplitz": lambda p: jax.scipy.linalg.toeplitz(p[0]),
    "scipy.ndimage.map_coordinates": lambda p: jax.scipy.ndimage.map_coordinates(p, [p[0] * 5, p[1] * 5], 1),
    "scipy.optimize.minimize": lambda p: (
        jax.scipy.optimize.minimize(lambda a: ((a - p[0]) ** 2).sum(), p[1], method="BFGS").x
    ),
    "scipy.sparse.linalg.bicgstab": lambda p: jax.scipy.sparse.linalg.bicgstab(positive_definite(p), p[0]),
    "scipy.sparse.linalg.cg": lambda p: jax.scipy.sparse.linalg.cg(positive_definite(p), p[0]),
    "scipy.sparse.linalg.gmres": lambda p: jax.scipy.sparse.linalg.gmres(positive_definite(p), p[0]),
    "scipy.spatial.transform.Rotation": lambda p: quaternions(p).as_matrix(),
    "scipy.spatial.transform.Slerp": lambda p: jax.scipy.spatial.transform.Slerp.init(
        jnp.arange(float(N)), quaternions(p)
    )(p[0] * 3).as_quat(),
    "scipy.special.sph_harm_y": lambda p: jax.scipy.special.sph_harm_y(
        integer_row() % 3, jnp.zeros(N, int), p[0], p[1], n_max=3
    ),
    "scipy.special.zeta": lambda p: jax.scipy.special.zeta(2 + p, 1 + square(p, 1)),
    "scipy.stats.gaussian_kde": lambda p: jax.scipy.stats.gaussian_kde(p[:2])(square(p, 1)[:2]),
}


# JAX's transformations, which take functions and return them.
@jax.custom_jvp
def twice_with_jvp(x, y):
    return 2 * x * y


twice_with_jvp.defjvp(lambda primals, tangents: (twice_with_jvp(*primals), 3 * tangents[0] + tangents[1] * primals[0]))


@jax.custom_vjp
def twice_with_vjp(x, y):
    return 2 * x * y


twice_with_vjp.defvjp(lambda x, y: (2 * x * y, (x, y)), lambda kept, t: (3 * t * kept[1], t * kept[0]))


def tanh_twice(x):
    return jnp.tanh(jnp.tanh(x))


TRANSFORMATIONS = {
    "checkpoint": lambda p: jax.checkpoint(tanh_twice)(p),
    "checkpoint with a policy": lambda p: jax.checkpoint(
        lambda x: jnp.tanh(x @ x), policy=jax.checkpoint_policies.dots_saveable
    )(p),
    "custom_jvp": lambda p: twice_with_jvp(p, square(p, 1)),
    "custom_vjp": lambda p: twice_with_vjp(p, square(p, 1)),
    "hessian": lambda p: jax.hessian(lambda x: jnp.sum(tanh_twice(x) ** 2))(p[0]),
    "jit of a static argument": lambda p: jax.jit(lambda x, power: x**power, static_argnums=1)(p, 3),
    "jvp": lambda p: jax.jvp(tanh_twice, (p,), (square(p, 1),)),
    "linear_transpose": lambda p: jax.linear_transpose(lambda x: p @ x, p)(square(p, 1)),
    "linearize": lambda p: jax.linearize(tanh_twice, p)[1](square(p, 1)),
    "named_call": lambda p: jax.named_call(tanh_twice)(p),
    "pure_callback": lambda p: jax.pure_callback(
        np.cumsum, jax.ShapeDtypeStruct((N * N,), p.dtype), lax.stop_gradient(p)
    ),
    "shard_map": in_shard_map(lambda a: a + lax.psum(jnp.tanh(a), "i")),
    "vjp": lambda p: jax.vjp(tanh_twice, p)[1](square(p, 1)),
}


NOT_FROM_A_CPU = {"pure_callback"}  # lowered for CUDA where there is a GPU alone


def jsp():
    return jax.experimental.sparse


CALLS = {
    **{f"jax.{name}": call for name, call in TRANSFORMATIONS.items()},
    **{f"jax.numpy.{name}": call for name, call in NUMPY.items()},
    **{f"jax.lax.{name}": call for part in (LOOPS, COLLECTIVES, SHARED, LAX) for name, call in part.items()},
    **{f"jax.experimental.sparse.{name}": call for name, call in SPARSE.items()},
    **{f"jax.{name}": call for name, call in OTHERS.items()},
}
# Numbers without signs: what their derivative is, XLA decides, as it may leave out a cast and the cast back.
WITHOUT_GRADIENT = {"jax.numpy.float8_e8m0fnu"}

# Their results differ from call to call, or by a factor.
UNDETERMINED = {
    f"jax.{name}" for name in "lax.empty lax.rng_uniform lax.linalg.eig numpy.empty numpy.empty_like".split()
}

# What is no part of a program, by the reason.
_NO_PROGRAMS = {
    "a type, a warning, or a list of names": {
        "numpy": "ComplexWarning character complexfloating dtype finfo flexible floating generic iinfo inexact integer "
        "ndarray number object_ signedinteger unsignedinteger",
        "lax": "AccuracyMode ConvDimensionNumbers ConvGeneralDilatedDimensionNumbers DotAlgorithm DotAlgorithmPreset "
        "DotDimensionNumbers FftType GatherDimensionNumbers GatherScatterMode Precision PrecisionLike "
        "RaggedDotDimensionNumbers RandomAlgorithm RoundingMethod ScatterDimensionNumbers Tolerance",
        "lax.linalg": "EigImplementation EighImplementation SvdAlgorithm",
        "nn.initializers": "Initializer",
        "random": "Key",
        "image": "ResizeMethod",
        "experimental.sparse": "CuSparseEfficiencyWarning JAXSparse SparseEfficiencyError SparseEfficiencyWarning "
        "SparseTracer",
    },
    "it returns no arrays: text, types, shapes": {
        "numpy": "array_repr array_str broadcast_shapes einsum_path get_printoptions printoptions promote_types "
        "result_type set_printoptions",
        "lax": "after_all broadcast_shapes create_token conv_dimension_numbers conv_general_permutations "
        "conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple dce_sink dtype padtype_to_pads "
        "reduce_window_shape_tuple",
        "nn": "get_scaled_dot_general_config",
        "random": "key_dtype key_impl",
    },
    "files": {"numpy": "fromfile fromiter load save savez"},
    "it looks at values": {"numpy": "trim_zeros"},
    "several devices, or one kind of them": {
        "lax": "pbroadcast precv psend psum_scatter_start ragged_all_to_all",
        "nn": "scaled_dot_general",
    },
}
NO_PROGRAMS = {
    f"jax.{module}.{name}": reason
    for reason, modules in _NO_PROGRAMS.items()
    for module, names in modules.items()
    for name in names.split()
}
