"""Draws results/whole_computations.svg, the README's picture, from the table in results/models.md.

python benchmarks/whole_computations.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
COLORS = {"jit(f)": "#1f77b4", "jit(fuse(f))": "#d62728"}
LABELS = {
    "gpt": "GPT, a step",
    "attention": "causal attention",
    "gemma_attention": "Gemma's attention",
    "equinox": "Equinox's attention",
    "loss_optax": "optax's loss",
    "ppo": "PPO's loss",
}


def milliseconds() -> dict[str, tuple[float, float]]:
    """Of each label, under jit and under jit(fuse)."""
    lines = (RESULTS / "models.md").read_text().splitlines()
    cells = {row[0]: row[1:] for line in lines if (row := [cell.strip() for cell in line.strip("|").split("|")])}
    return {label: (float(cells[name][0]) / 1e3, float(cells[name][1]) / 1e3) for name, label in LABELS.items()}


def figure():
    """The text is 10 pixels high where a phone shows the picture 360 pixels wide."""
    times = milliseconds()
    made, axes = plt.subplots(figsize=(5.4, 3.5), layout="constrained")
    for i, (name, color) in enumerate(COLORS.items()):
        bars = axes.barh([y + 0.4 * i for y in range(len(times))], [t[i] for t in times.values()], 0.38, color=color)
        axes.bar_label(bars, [f"{t[i]:.1f}" for t in times.values()], padding=3)
        bars.set_label(name)
    axes.set_yticks([y + 0.2 for y in range(len(times))], times)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    device = (RESULTS / "models.md").read_text().split("\n\n")[1].split(",")[0].removesuffix(" 80GB HBM3")
    axes.set_title(f"milliseconds, forward and backward\n{device}, bfloat16")
    axes.legend(loc="lower right", frameon=False)
    return made


if __name__ == "__main__":
    plt.rcParams.update({"font.size": 12, "axes.titlesize": 12, "svg.hashsalt": "whole_computations"})
    figure().savefig(RESULTS / "whole_computations.svg", metadata={"Date": None})
