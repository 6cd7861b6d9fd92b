"""A call of a kernel has a price of its own: what XLA's handlers do at each execution, on GPUs that only count."""

import counting_gpu
import emulated
import jax
import pytest

pytestmark = emulated.compiler_is_needed
CALLS = """
from attention_cases import Case, attention_in, described_call, scaled
from jax_softmax.runtime.kernel_spec import described

def attention(n=128):
    found, extents = attention_in(Case(scaled, (n, n)))["forward"]
    return described_call(found, "forward", "bfloat16", extents)

def operator(op="softmax", shape=(64, 512), **options):
    spec = described(op, shape, (1,), "bfloat16", **options)
    return {"operands": spec.operands, "results": spec.results, "attributes": spec.attributes}

def call_of(described):
    of_attention = "kernel" in described["attributes"]
    return Call(_kernels.attention_handlers() if of_attention else _kernels.cuda_handlers(), **described)

def launched(call, **how):
    call.run("execute", **how)
    return gpu().launched().contents
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a body in a process whose GPUs only count, with CALLS at hand."""
    source = tmp_path_factory.mktemp("gpu") / "counting_gpu.cc"
    source.write_text((counting_gpu.HERE / "counting_gpu.cc").read_text())
    library = emulated.shared_library(source, f"-I{jax.ffi.include_dir()}", "-Wl,-soname,libcuda.so.1")
    return lambda body: counting_gpu.python(library, CALLS, body)


def test_an_execution_copies_and_plans_nothing(run):
    """It allocates no memory, so that it has neither a copy of the attributes nor a plan or a source. Nothing is
    compiled or loaded again, for another program or for a device of the same kind either."""
    run("""
        for described in (attention(), operator(), operator("log_softmax", load="x0 * C(0.5)", mask_shape=(1, 512))):
            for ordinal in range(2):
                for stage in ("initialize", "execute"):
                    call_of(described).run(stage, ordinal)
            before = gpu().times_compiled(), gpu().times_loaded()
            for call in (call_of(described), call_of(described)):
                for stage in ("initialize", "execute", "initialize", "execute"):
                    call.run(stage, ordinal=1)
                    assert gpu().times_allocated() == 0
            assert before == (gpu().times_compiled(), gpu().times_loaded())
        assert before == (3, 3)
    """)


def test_a_launch_has_the_addresses_and_the_stream_of_its_execution(run):
    run("""
        call = call_of(attention())
        for address in (1 << 20, 1 << 30):
            of = launched(call, stream=address + 1, address=address, step=4096)
            assert of.stream == address + 1
            assert of.words[:5] == [address + 4096 * k for k in range(5)]
        # Where an operator has no arrays beside its own, or no results of rows, a word is null.
        assert launched(call_of(operator()), address=16, step=16).words[:3] == [16, None, 32]
        call = call_of(operator("logsumexp", mask_shape=(1, 512)))
        assert launched(call, address=16, step=16).words[:4] == [16, 32, None, 48]
    """)


def test_tensor_maps_are_of_the_addresses_of_the_execution(run):
    """They come before the addresses, 16 words each."""
    run("""
        call = call_of(attention(256))
        for address in (1 << 20, 1 << 30):
            of = launched(call, ordinal=2, address=address, step=4096)
            expected = [address + 4096 * k for k in range(5)]
            assert of.words[0:48:16] == expected[:3] and of.words[48:53] == expected
    """)


def test_calls_that_differ_have_kernels_of_their_own(run):
    run("""
        kinds = [attention(), attention(256), operator(), operator(shape=(64, 1024)), operator("log_softmax")]
        kinds += [operator(load="x0 * C(2)"), operator(load="x0 * C(3)"), operator(out_dtype="float32")]
        kernels = [launched(call_of(kind)).kernel for kind in kinds]
        kernels.append(launched(call_of(operator()), address=2, step=1024).kernel)  # no whole packs
        assert len(set(kernels)) == len(kernels) == gpu().times_compiled()
        assert [launched(call_of(kind)).kernel for kind in kinds] == kernels[:-1]
    """)


def test_threads_share_what_is_ready(run):
    run("""
        import concurrent.futures
        kinds = [attention(), attention(256), operator(), operator("log_softmax")]

        def run(i):
            call, address = call_of(kinds[i % 4]), (i + 1) << 20
            for n in range(200):
                of = launched(call, ordinal=n % 2, stream=i, address=address, step=4096)
                assert (of.stream or 0, of.words[0]) == (i, address)
            return i % 4, of.kernel

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(run, range(16)))) == 4
        assert gpu().times_compiled() == gpu().times_loaded() == 4
    """)


def test_errors_are_reported_each_time(run):
    run("""
        def error(described, **how):
            call = call_of(described)
            found = []
            for _ in range(2):
                try:
                    call.run("execute", **how)
                except RuntimeError as raised:
                    found.append(str(raised))
            assert len(set(found)) == 1 and len(found) == 2
            return found[0]

        def with_attributes(described, **attributes):
            return described | {"attributes": described["attributes"] | attributes}

        launched(call_of(attention()))
        assert "attention: an operand does not begin at a multiple of 16 bytes" in error(attention(), address=8)
        assert "attention: wrong number of expressions" in error(with_attributes(attention(), expressions="x0"))
        assert "another version" in error(with_attributes(attention(), version=0))
        assert "attention: cuDeviceGet: ERROR" in error(attention(), ordinal=7)
        assert "softmax of an array of shape (64, 512): cuDeviceGet: ERROR" in error(operator(), ordinal=7)
        assert "unknown operator hardmax" in error(with_attributes(operator(), op="hardmax"))
        missing = operator()
        del missing["attributes"]["load"]
        assert "an attribute is missing" in error(missing)
    """)
