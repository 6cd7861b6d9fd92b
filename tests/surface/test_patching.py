"""`use()`: when the operators are in the place of `jax.nn`'s: in blocks, decorated functions, threads."""

import functools
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_patched, calls, operators

import jax_softmax
from jax_softmax.functions import patching

pytestmark = pytest.mark.usefixtures("switched_off_afterwards")


def in_another_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class Traced:
    """A function under `jax.jit`: called, it says whose softmax is in the program that there is then."""

    def __init__(self):
        self.times = 0
        self.jitted = jax.jit(self.function)

    def function(self, x):
        self.times += 1
        return jax.nn.softmax(x)

    def __call__(self):
        np.testing.assert_allclose(self.jitted(jnp.ones(4)), 0.25)
        return "ours" if "@jax_softmax(" in self.jitted.lower(jnp.ones(4)).as_text() else "theirs"


def test_while_the_block_lasts():
    with jax_softmax.use():
        assert_patched(True)
    assert_patched(False)
    with pytest.raises(ZeroDivisionError), jax_softmax.use():
        1 / 0  # noqa: B018
    assert_patched(False)


def test_until_it_is_switched_off():
    jax_softmax.use(True)
    assert_patched(True)
    jax_softmax.use(True)
    jax_softmax.use(False)
    assert_patched(False)
    jax_softmax.use(False)
    assert_patched(False)


def test_blocks_within_blocks():
    with jax_softmax.use():
        with jax_softmax.use():
            assert_patched(True)
        assert_patched(True)
        with jax_softmax.use(False):
            assert_patched(False)
        assert_patched(True)
    assert_patched(False)


def test_of_a_function_during_each_call():
    """And not before the first one."""

    @jax_softmax.use()
    def patched(raises=False):
        "What it does."
        assert_patched(True)
        return 1 / 0 if raises else 7

    @jax_softmax.use(False)
    def unpatched():
        assert_patched(False)
        return patched()

    assert_patched(False)
    for _ in range(3):
        assert patched() == unpatched() == 7
        assert_patched(False)
    with pytest.raises(ZeroDivisionError):
        patched(raises=True)
    assert_patched(False)
    with jax_softmax.use():
        assert unpatched() == patched() == 7
        assert_patched(True)
    assert_patched(False)
    assert (patched.__name__, patched.__doc__) == ("patched", "What it does.")


@pytest.mark.parametrize("on", ["off", 0, None], ids=["text", "number", "None"])
def test_what_is_no_bool_is_refused(on):
    with pytest.raises(TypeError, match="use: on must be True or False, got one of type"):
        jax_softmax.use(on)
    assert_patched(False)


def test_what_others_put_there_stays(monkeypatch):
    def another(x):
        return x

    monkeypatch.setattr(jax.nn, "softmax", another)
    with jax_softmax.use():
        assert jax.nn.softmax is another
        assert_patched(True, names=["log_softmax"])
    assert jax.nn.softmax is another


def test_modules_have_no_original_under_any_name():
    jax_softmax.use(losses=True)
    originals = {id(original) for original in patching.originals.values()}
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in ("jax", "flax", "optax")]
    assert not [(m.__name__, name) for m in modules for name, value in vars(m).items() if id(value) in originals]
    assert calls(lambda x: jax.scipy.special.softmax(x, axis=-1), jnp.ones((2, 3)))


def test_what_was_traced_before_is_traced_again():
    """Once for each: what was traced with ours, and what without, is kept."""
    f = Traced()
    assert f() == "theirs"
    with jax_softmax.use():
        assert f() == "ours"
        with jax_softmax.use(False):
            assert f() == "theirs"
        assert f() == "ours"
    assert f() == "theirs"
    jax_softmax.use()
    assert f() == "ours"
    assert f.times == 2


def test_what_was_traced_within_is_traced_again_without():
    f = Traced()
    with jax_softmax.use():
        assert f() == "ours"
    assert f() == "theirs"


@pytest.mark.parametrize("transformation", [jax.jit, jax.checkpoint, "scan", "custom_vjp"])
def test_functions_within_functions_are_traced_again(transformation):
    x = jnp.ones(4)
    if transformation == "scan":

        def step(x, _):
            return jax.nn.softmax(x), None

        def inner(x):
            return jax.lax.scan(step, x, length=2)[0]
    elif transformation == "custom_vjp":

        @jax.custom_vjp
        def inner(x):
            return jnp.sin(x)

        inner.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (jax.nn.softmax(x) * t,))
    else:
        inner = transformation(lambda x: jax.nn.softmax(x))
    step_of_training = jax.jit(jax.grad(lambda x: jnp.sum(inner(x) ** 2)))

    def ours():
        return "@jax_softmax(" in step_of_training.lower(x).as_text()

    found = [ours()]
    with jax_softmax.use():
        found.append(ours())
    assert [*found, ours()] == [False, True, False]


def test_of_one_thread():
    f, before, after = Traced(), [], []
    entered, checked = threading.Event(), threading.Event()

    def other():
        with jax_softmax.use():
            entered.set()
            checked.wait(60)
            after.append(f())

    thread = threading.Thread(target=other)
    before.append(f())
    thread.start()
    assert entered.wait(60)
    before.append(f())
    checked.set()
    thread.join()
    assert (before, after, f()) == (["theirs", "theirs"], ["ours"], "theirs")
    jax_softmax.use()
    assert (f(), in_another_thread(f)) == ("ours", "theirs")


def test_one_switch_for_many_blocks_and_functions():
    switch = jax_softmax.use()
    for _ in range(2):
        with switch:
            with switch:
                assert_patched(True)
            assert_patched(True)
        assert_patched(False)
    decorated = [switch(lambda: assert_patched(True)) for _ in range(2)]
    assert_patched(False)
    for function in decorated:
        function()
    assert_patched(False)


def test_everything_for_a_while():
    """What `fuse` asks for: nothing before the block, there all functions, in this thread."""
    block = patching.while_fusing()
    f, x = Traced(), jnp.ones((2, 3))
    assert f() == "theirs"
    with block:
        assert (f(), in_another_thread(f)) == ("ours", "theirs")
        assert operators(jax.scipy.special.logsumexp, x) == {"logsumexp"}
    assert f() == "theirs"
    assert operators(jax.scipy.special.logsumexp, x) == set()


def test_options_that_are_no_bool_are_refused():
    with pytest.raises(TypeError, match="use: losses must be True or False, got one of type int"):
        jax_softmax.use(losses=1)
    assert_patched(False)


def test_functions_that_run_after_their_call_are_not_decorated():
    def numbers():
        yield 1

    async def number():
        return 1

    async def later():
        yield 1

    class Numbers:
        def __call__(self):
            yield 1

    for function in (numbers, number, later, functools.partial(numbers), Numbers()):
        with pytest.raises(TypeError, match="use: a decorated function must not be a generator or asynchronous"):
            jax_softmax.use()(function)
        assert_patched(False)
    with pytest.raises(TypeError, match="use: what is decorated must be a function, got 3"):
        jax_softmax.use()(3)
    assert_patched(False)


def test_decorators_that_are_written_otherwise():
    """Without parentheses, and on a class: the error says what to write."""

    class Model:
        pass

    for decorate, words in (
        (lambda: jax_softmax.use(len), "a function must be decorated with @jax_softmax.use(), in parentheses"),
        (lambda: jax_softmax.use(Model), "a class's methods must be decorated with @jax_softmax.use()"),
        (lambda: jax_softmax.use()(Model), "Decorate its methods with @jax_softmax.use()"),
    ):
        with pytest.raises(TypeError, match=re.escape(words)):
            decorate()
        assert_patched(False)
