"""Each price of `runtime/costs.py` is, up to a tenth, what its row of benchmarks/results/ says; or it was chosen."""

import re
from pathlib import Path

import numpy as np
import pytest

from jax_softmax.runtime import costs, explain

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="a source distribution has no benchmarks/results")
CHOSEN = {
    *(
        "MULTIPROCESSORS",
        "INSTRUCTIONS_OF_FUNCTION",
        "INSTRUCTIONS_OF_ROUNDING",
        "INSTRUCTIONS_OF_OPERATOR",
        "FUNCTION",
    ),
    *(
        "FOLDED_OPERATION",
        "REMADE_SOFTMAX",
        "WORTH_REMAKING",
        "MADE_OF_LITTLE",
        "KERNEL_WINS",
        "SAME_PLACE",
        "ELEMENT_OF_ODD_ROWS",
    ),
    *("LONGEST_ROW_OF_XLA", "ATTENTION_FEATURES", "ATTENTION_LEAST", "ATTENTION_WITH_ARRAYS"),
    *("ATTENTION_FEW_FEATURES", "WORTH_NO_WEIGHTS", "CALL", "LONG_ROW_ON_CPU", "MORE_MEMORY", "WORTH_MEMORY"),
}


def text_of(table):
    return (RESULTS / f"{table}.md").read_text()


def row(table, name, section=""):
    """The numbers of the first row of this name after a heading, or in a table."""
    cells = re.search(rf"^\| {name} \|(.*)$", text_of(table).partition(section or "\n")[2], re.MULTILINE)[1]
    return [float(number) for number in re.findall(r"(?<=\s)[\d.]+(?=\s\|)", cells)]


def copy_rate():
    return 1e12 * float(re.search(r"^copy rate ([\d.]+) TB/s$", text_of("fused"), re.MULTILINE)[1])


def xla_speed(columns):
    return row("results", columns, "### softmax, bfloat16\n")[1]


OTHER_CHIPS = "### By the kernels of chips before Hopper"


def attention_prices(forward, with_gradients):
    """Of "plain B8 S2048 H16 D64", in microseconds."""
    picoseconds = [1e6 * time / (8 * 16 * 2048**2) for time in (forward, with_gradients - forward)]
    return [costs.BYTES_OF_PICOSECOND * time for time in picoseconds]


def of_features():
    """What other chips' backward kernels take beyond what they would with 128 features, what XLA's products take of
    one, and what kernels of tangents and of float32 take, as multiples."""

    def rows(name):
        """By kernels of rows: of the output, and with gradients."""
        return row("attention_prices", name, "### Kernels of rows, and of attention")[::2]

    def times(name):
        return row("attention_prices", name, OTHER_CHIPS)

    few, many = (times(f"plain B4 S2048 H16 D{n}") for n in (128, 192))
    of_128, of_256 = (rows(f"plain B8 S1024 H16 D{n}")[1] for n in (128, 256))
    of_feature = 1e6 * (of_256 - of_128) / (8 * 16 * 1024**2) / (6 * 128)  # picoseconds of a score
    return {
        "ATTENTION_MANY": (many[1] - many[0]) / (1.5 * (few[1] - few[0])),
        "PRODUCT_OF_FEATURE": costs.BYTES_OF_PICOSECOND * of_feature,
        "ATTENTION_TANGENTS": times("moving B8 S1024 H16 D64")[0] / times("plain B8 S1024 H16 D64")[0],
        "ATTENTION_OF_FLOAT32": times("plain B8 S1024 H16 D128 float32")[1] / times("plain B8 S1024 H16 D128")[1],
    }


def measured():
    """By their names, prices as the tables have them."""
    name, gpus = "plain B8 S2048 H16 D64", explain.GPUS
    forward, backward = attention_prices(*row("attention_prices", name, OTHER_CHIPS))
    of_hopper = attention_prices(*row("attention", name)[1:4:2])
    return {
        "COPY_RATE": copy_rate(),
        "INSTRUCTION": copy_rate() / (costs.MULTIPROCESSORS * 128 * 1.7e9),
        "FOLDED_FUNCTION": 4 * (max(row("fused", "tanh cap")) - 1),
        "XLA_SPEED_OF_ROWS": [xla_speed(256), xla_speed(1024), xla_speed(8192)],
        "BYTES_OF_PICOSECOND": np.sqrt(gpus["H100"].copy_rate * gpus["H200"].copy_rate) / 1e12,
        "ATTENTION_FORWARD_ON_HOPPER": of_hopper[0],
        "ATTENTION_BACKWARD_ON_HOPPER": of_hopper[1],
        "ATTENTION_FORWARD": forward,
        "ATTENTION_BACKWARD": backward,
        **of_features(),
    }


def test_prices_are_those_of_the_tables():
    for name, expected in measured().items():
        price = getattr(costs, name)
        price = list(price.values()) if isinstance(price, dict) else price
        np.testing.assert_allclose(price, expected, rtol=0.1, err_msg=name)


def test_every_price_is_measured_or_chosen():
    assert {name for name in vars(costs) if name.isupper()} == CHOSEN | measured().keys()
