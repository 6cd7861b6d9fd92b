"""Draws results/whole_computations.png, the README's picture, from the tables in results/.

python benchmarks/whole_computations.py

Bars are times and temporary memories relative to XLA's.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
OURS, THEIRS = "#d62728", "#1f77b4"


class Bars(NamedTuple):
    label: str
    times: tuple[str, str]  # XLA's and ours, as the tables have them
    time_unit: str
    memories: tuple[str, str]
    memory_unit: str


def table(name: str) -> list[dict[str, str]]:
    """The rows of all tables of a page; a column that has no name of its own is the memory of the one before it."""
    rows, head = [], None
    for line in (RESULTS / f"{name}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = [f"{cells[i - 1]}, memory" if cell == "memory" else cell for i, cell in enumerate(cells)]
        elif set(line) - set("| -"):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def row(rows: list[dict[str, str]], first: str, second: str = "") -> dict[str, str]:
    """The row whose first cells begin like this."""
    (found,) = (r for r in rows if (cells := [*r.values()]) and cells[0] == first and cells[1].startswith(second))
    return found


def of_model(label: str, name: str) -> Bars:
    r = row(table("models"), name)
    memories = r["temporary memory, MiB: XLA"], r["fused"]
    return Bars(f"{label},\nunchanged, under fuse", (r["XLA, µs"], r["fused, µs"]), "µs", memories, "MiB")


def of_gpt() -> Bars:
    xla, ours = (row(table("gpt"), name) for name in ("jax.nn and optax", "softmax and cross_entropy_loss"))
    memories = xla["temporary memory, MiB"], ours["temporary memory, MiB"]
    return Bars("gradient step of a GPT,\nsoftmax and loss replaced", (xla["ms"], ours["ms"]), "ms", memories, "MiB")


def of_loss(logits: str) -> Bars:
    r = row(table("losses"), logits)
    memories = r["XLA, memory"], r["cross_entropy_loss, memory"]
    label = f"cross_entropy_loss and gradient,\nlogits of {logits}"
    return Bars(label, (r["XLA"], r["cross_entropy_loss"]), "µs", memories, "MiB")


def of_linear_layer(shape: str) -> Bars:
    xla, ours = (row(table("linear_cross_entropy"), shape, name) for name in ("optax", "as the rule has it"))
    memory = "temporary memory, GB"
    tokens, _, vocabulary = shape.strip("()").split(", ")
    label = f"linear_cross_entropy and gradients,\n{tokens} tokens, vocabulary {vocabulary}"
    return Bars(label, (xla["ms"], ours["ms"]), "ms", (xla[memory], ours[memory]), "GiB")


def all_bars() -> list[Bars]:
    return [
        of_model("gradient step of a GPT", "gpt"),
        of_gpt(),
        of_model("causal attention", "attention"),
        of_model("causal attention through float32", "attention_float32"),
        of_model("Gemma's attention", "gemma_attention"),
        of_loss("(8192, 50257)"),
        of_linear_layer("(8192, 4096, 128256)"),
        of_linear_layer("(32768, 2560, 128256)"),
    ]


def draw(panel, title: str, pairs: list[tuple[str, str]], units: list[str]) -> None:
    for y, (pair, unit) in enumerate(zip(pairs, units, strict=True)):
        for value, middle, color in zip(pair, (y - 0.2, y + 0.2), (THEIRS, OURS), strict=True):
            width = float(value) / float(pair[0])
            panel.barh(middle, width, 0.38, color=color)
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            panel.annotate(f"{value} {unit}", (width, middle), **place)
    panel.set_ylim(len(pairs) - 0.4, -0.6)
    panel.set_xlim(0, 1.45)
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1])
    panel.set_title(title, fontsize=11)
    panel.spines[["top", "right"]].set_visible(False)


def figure():
    bars = all_bars()
    made, panels = plt.subplots(1, 2, figsize=(10, 5.8), sharey=True)
    draw(panels[0], "time, XLA = 1", [b.times for b in bars], [b.time_unit for b in bars])
    draw(panels[1], "temporary memory, XLA = 1", [b.memories for b in bars], [b.memory_unit for b in bars])
    panels[0].set_yticks(range(len(bars)), [b.label for b in bars])
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (THEIRS, OURS)]
    labels = ["XLA: jax.nn and optax", "jax_softmax"]
    device = (RESULTS / "models.md").read_text().split("\n\n")[1].split(",")[0]
    made.legend(handles, labels, title=f"{device}, bfloat16", loc="upper center", ncols=2, frameon=False)
    made.tight_layout(rect=(0, 0, 1, 0.92))
    return made


if __name__ == "__main__":
    figure().savefig(RESULTS / "whole_computations.png", dpi=110)
