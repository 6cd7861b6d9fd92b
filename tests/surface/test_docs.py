"""Python blocks of README.md and docs/ run, links lead somewhere, and the API page has every public name."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.fusion.kernels import memory, traffic
from jax_softmax.runtime import judge

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
FENCES = {page: [t for t in MarkdownIt().parse(page.read_text()) if t.type == "fence"] for page in PAGES}
IN_PYTHON = {page: blocks for page in PAGES if (blocks := [t for t in FENCES[page] if t.info == "python"])}
# A page is skipped from the first block on that imports one of these where it is not installed.
OPTIONAL = {"flax": "flax.nnx", "optax": "optax"}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", IN_PYTHON, ids=name_of)
def test_python_blocks_run(page):
    """In their order, in one namespace."""
    names = {"__name__": page.stem}
    for block in IN_PYTHON[page]:
        for package, module in OPTIONAL.items():
            if re.search(rf"^(import|from) {package}\b", block.content, re.MULTILINE):
                pytest.importorskip(module)
        lines_before = "\n" * (block.map[0] + 1)  # for the traceback's line to be the page's
        exec(compile(lines_before + block.content, str(page), "exec"), names)


@pytest.mark.skipif(not RESULTS.exists(), reason="a source distribution has no benchmarks/results, to which pages link")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    tokens = (t for inline in MarkdownIt().parse(page.read_text()) for t in inline.children or [])
    targets = [t.attrs.get("href") or t.attrs.get("src") for t in tokens if t.type in ("link_open", "image")]
    for target in targets:
        if not re.match(r"https?:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_named_test_files_exist():
    """Those in pages, sources, settings and CI, by their path from the checkout or from tests/."""
    texts = [ROOT / "pyproject.toml", *PAGES, *(ROOT / "jax_softmax").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    texts += [path for folder in (".ci", ".github") for path in (ROOT / folder).rglob("*") if path.is_file()]
    for text in texts:
        for named in re.findall(r"[\w/]*\btest_\w+\.py\b", text.read_text()):
            named = named.removeprefix("/")  # of {project}/tests/…
            assert any((folder / named).exists() for folder in (ROOT, ROOT / "tests")), (text, named)


def test_installs_are_of_the_checkout():
    """The package's name on PyPI is not ours."""
    sources = [path for folder in ("jax_softmax", "examples") for path in (ROOT / folder).rglob("*.py")]
    for path in [*PAGES, *sources]:
        assert not re.search(r"pip install\b[^`\n]*\bjax[_-]softmax\b", path.read_text()), path


def test_every_reason_to_leave_a_call_to_xla_is_explained():
    """In the order in which `judge.py` asks for them."""
    nodes = ast.walk(ast.parse(inspect.getsource(judge.reason_on_gpu)))
    returned = sorted((n for n in nodes if isinstance(n, ast.Return)), key=lambda n: n.lineno)
    of_views = [n.value.value for n in returned if isinstance(n.value, ast.Constant) and n.value.value]
    page = (ROOT / "docs" / "fusion.md").read_text()
    table = re.findall(r"^\| ([^|]*) \|", page.partition("| `explain` says |")[2], re.MULTILINE)
    tie, small, found = (traffic.Traffic(1 << 25, *(n << 20 for n in of)) for of in ((8, 8), (8, 16), (16, 32)))
    of_bytes = [traffic.reason_by_traffic(one, one.kernel_wins, "") for one in (tie, small)]
    first = [judge.NOT_COMPILED, *of_bytes, judge.NO_KERNEL, judge.SYMBOLIC]
    in_a_chain = f"{judge.IN_A_CHAIN}, which moves 8.0 MiB, the kernels 16.0 MiB"
    of_memory = f"{judge.MORE_MEMORY} {memory.Balance(32 << 20, 1.15, 0.98)}"
    assert table == [*first, *of_views, judge.MADE_OF_ROWS, judge.WITH_ANOTHER, in_a_chain, of_memory]
    assert f"`{traffic.reason_by_traffic(found, found.kernel_wins, of_views[-1])}`" in " ".join(page.split())
    work = judge.Attention(
        128, 128, {"i": 32, "j": 32, "d": 64, "e": 64}, 1.0, {"forward": False}, score_bytes=12, n_products=2
    )
    of_attention = judge.reason_against_attention(work)
    assert f"`{of_attention}`" in " ".join(page.split())
    sizes = [f"{packs * judge._PACK} bytes" for packs in (judge._SHORT_RUN, judge._IDLING)]
    sizes += [f"{judge._SHORT_RUN_IN_RING >> 10} KiB", f"more than {_kernels.MAX_DIMS} dimensions"]
    assert all(size in page for size in sizes)


def test_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"auto(?:function|class):: (\w+)", text)) == sorted(jax_softmax.__all__)


@pytest.mark.skipif(not RESULTS.exists(), reason="a source distribution has no benchmarks/results")
def test_the_picture_finds_its_figures():
    """Those of the table, whose rows have the names that it looks for."""
    pytest.importorskip("matplotlib")
    from whole_computations import milliseconds

    assert all(min(times) > 0 for times in milliseconds().values())
