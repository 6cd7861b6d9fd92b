"""Tables and pictures of the results."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from peers import OURS, TORCH, XLA

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

PEERS = (OURS, XLA, TORCH)
COLORS = {OURS: "#d62728", XLA: "#1f77b4", TORCH: "#7f7f7f"}
MARKERS = {OURS: "o", XLA: "s", TORCH: "^"}
DIRECTIONS = ("forward", "backward")
NOTHING = "\u2013"  # in a table
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

Record = dict[str, Any]


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes results.md and the pictures; returns the paths."""
    written = [folder / "results.md"]
    written[0].write_text(markdown(results))
    title = f"{results['device']}, {results['date']}"
    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    figures: dict[str, Any] = {}
    for op in ("softmax", "log_softmax"):
        figures[f"rows_{op}"] = rows_figure([r for r in results.get("rows", []) if r["op"] == op], op, title)
    figures["few_rows"] = few_figure(results.get("few", []), title)
    for dtype in ("bfloat16", "float32"):
        chosen = [r for r in results.get("axes", []) if r["dtype"] == dtype]
        figures[f"axes_{dtype}"] = axes_figure(chosen, dtype, title)
    for name, figure in figures.items():
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=150)
            plt.close(figure)
    return written


# ---- Tables


def markdown(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    driver = f", driver {results['driver']}" if "driver" in results else ""
    on_gpu = results["platform"] == "gpu"
    clock = (
        "Device time: the durations of the kernels (PyTorch: CUDA events around a CUDA graph of calls)."
        if on_gpu
        else "Wall clock, the fastest of several calls."
    )
    parts = [
        "# Results",
        f"{results['device']}{driver}; {versions}. {results['date']}{', quick run' if results['quick'] else ''}.",
        f"{clock} Fractions are the bytes that must move (forward two tensors, backward three) over the time, relative "
        "to the rate at which a float32 negation of as many bytes runs in the same process. A backward reads twice "
        "what it writes and can pass 1. A dash: not covered or not measured.",
    ]
    if rates := [r["copy_rate"] for r in results.get("rows", []) + results.get("axes", []) if r["copy_rate"]]:
        parts.append(f"Copy rate: {min(rates) / 1e9:,.0f} to {max(rates) / 1e9:,.0f} GB/s.")
    parts += _rows_tables(results.get("rows", []))
    parts += _axes_tables(results.get("axes", []))
    parts += _few_table(results.get("few", []))
    parts += _chain_table(results.get("chain", []))
    parts += _accuracy_table(results.get("accuracy", []))
    parts += _compiling_table(results.get("compiling", {}))
    parts += _failures(results)
    return "\n\n".join(parts) + "\n"


def _table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def _cell(record: Record | None, peer: str, text: Callable[[Record], str]) -> str:
    if record is None or (peer not in record["seconds"] and peer not in record["failed"]):
        return NOTHING
    if peer in record["failed"]:
        return NOTHING if "not measured" in record["failed"][peer] else "fails"
    return text(record)


def _present(records: list[Record]) -> list[str]:
    return [p for p in PEERS if any(p in r["seconds"] or p in r["failed"] for r in records)]


def _fraction_table(records: list[Record], first: str, label: Callable[[Record], str]) -> str:
    peers = _present(records)
    found = {(label(r), r["direction"]): r for r in records}
    lines = []
    for name in dict.fromkeys(label(r) for r in records):
        cells = [
            _cell(found.get((name, direction)), peer, lambda r, peer=peer: f"{r['fraction'][peer]:.2f}")
            for direction in DIRECTIONS
            for peer in peers
        ]
        lines.append([name, *cells])
    return _table([first, *(f"{direction}: {peer}" for direction in DIRECTIONS for peer in peers)], lines)


def _rows_tables(records: list[Record]) -> list[str]:
    parts = ["## Rows, by length"] if records else []
    for op, dtype in dict.fromkeys((r["op"], r["dtype"]) for r in records):
        chosen = [r for r in records if (r["op"], r["dtype"]) == (op, dtype)]
        parts += [f"### {op}, {dtype}", _fraction_table(chosen, "columns", lambda r: str(r["shape"][1]))]
    return parts


def _view(record: Record) -> str:
    shape = ", ".join(_extent(n) for n in record["shape"])
    axes = ", ".join(map(str, record["axes"]))
    name = f"({shape}) along {axes if len(record['axes']) == 1 else f'({axes})'}"
    return name + (", by vmap of vmap" if record["vmapped"] else "")


def _extent(n: int) -> str:
    power = n.bit_length() - 1
    return f"2^{power}" if power >= 20 and n == 1 << power else str(n)


def _axes_tables(records: list[Record]) -> list[str]:
    parts = ["## Other axes"] if records else []
    for dtype in dict.fromkeys(r["dtype"] for r in records):
        chosen = [r for r in records if r["dtype"] == dtype]
        parts += [f"### softmax, {dtype}", _fraction_table(chosen, "shape", _view)]
    return parts


def _few_table(records: list[Record]) -> list[str]:
    if not records:
        return []
    peers, dtypes = _present(records), list(dict.fromkeys(r["dtype"] for r in records))
    found = {(_shape(r), r["dtype"]): r for r in records}
    lines = []
    for name in dict.fromkeys(map(_shape, records)):
        cells = [
            _cell(found.get((name, dtype)), peer, lambda r, peer=peer: _microseconds(r["seconds"][peer]))
            for dtype in dtypes
            for peer in peers
        ]
        lines.append([name, *cells])
    header = ["shape", *(f"{dtype}: {peer}" for dtype in dtypes for peer in peers)]
    about = (
        "softmax along the last axis, µs a call. The same array every time: it is in the last cache if it fits there."
    )
    return ["## Few rows", about, _table(header, lines)]


def _shape(record: Record) -> str:
    return f"({', '.join(map(_extent, record['shape']))})"


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _chain_table(records: list[Record]) -> list[str]:
    if not records:
        return []
    shape, length = tuple(records[0]["shape"]), records[0]["length"]
    lines = []
    for r in records:
        how = "an optimization barrier between any two" if r["apart"] else "one after the other"
        cells = [_microseconds(r[k]) if k in r else NOTHING for k in ("wall", "wall_kept", "device")]
        lines.append([how, r["peer"], *cells, f"{r['kernels']:.0f}" if "kernels" in r else r.get("failed", NOTHING)])
    header = ["chain", "", "wall, µs", "wall, results kept, µs", "kernels, µs", "kernels a call"]
    about = (
        f"{length} softmaxes of a bfloat16 {shape} in one jitted function. The wall clock is that of calls in a row, "
        "with CUDA graphs if XLA uses them; the kernels' own times are without. Where the results of all calls are "
        "kept, each has a new address, and XLA captures a graph anew for every one beyond 16."
    )
    return ["## A chain of small softmaxes", about, _table(header, lines)]


def _accuracy_table(records: list[Record]) -> list[str]:
    if not records:
        return []
    about = (
        "The largest error against float64 on the same inputs, normal numbers times the magnitude, in units of the "
        "dtype's eps. Relative to the element (softmax), to the element or 1, the larger (log-softmax), or to the "
        "terms whose difference it is (backward); and to no less than what may underflow."
    )
    cells: dict[tuple, dict[str, Record]] = {}
    for r in records:
        cells.setdefault((r["op"], r["dtype"], _shape(r), f"{r['magnitude']:g}"), {})[r["direction"]] = r
    lines = []
    for key, found in cells.items():
        errors = [_error(found[d]["error"][p]) if d in found else NOTHING for d in DIRECTIONS for p in (OURS, XLA)]
        lines.append([*key, *errors])
    header = ["operator", "dtype", "shape", "magnitude", *(f"{d}: {p}" for d in DIRECTIONS for p in (OURS, XLA))]
    return ["## Accuracy", about, _table(header, lines)]


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.2f}"


def _compiling_table(found: Record) -> list[str]:
    if "kernels" not in found:
        return []
    parts = ["## Making kernels"]
    lines = []
    for name, label in (("made", "by NVRTC"), ("read", "from disk")):
        seconds = sorted(r[name] for r in found["kernels"])
        lines.append([label, f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * seconds[-1]:.1f}"])
    worst = max(found["kernels"], key=lambda r: r["made"])
    parts.append(
        f"One of the {len(found['kernels'])} kernels of the cases above, in a process that has made one before. What "
        f"takes longest: {worst['plan']}."
    )
    parts.append(_table(["a kernel", "median, ms", "worst, ms"], lines))
    if calls := found.get("first_call"):
        parts.append("The first call of a program of 50 softmaxes of 10 shapes and their gradient, in a new process.")
        labels = (("empty", "jax_softmax, no kernels kept"), ("filled", "jax_softmax, kernels on disk"), ("xla", "XLA"))
        parts.append(_table(["first call", "s"], [[label, f"{calls[name]:.2f}"] for name, label in labels]))
    return parts


def _failures(results: dict[str, Any]) -> list[str]:
    lines, skipped = [], 0
    for section in ("rows", "axes", "few"):
        for r in results.get(section, []):
            for peer, why in r["failed"].items():
                if "not measured" in why:
                    skipped += 1
                    continue
                lines.append(f"- {peer}, {r['op']} {r['direction']}, {r['dtype']} {_view(r)}: {why}")
    if skipped:
        lines.append(f"- {skipped} cases for want of time")
    return ["## Failed, or not measured", "\n".join(lines)] if lines else []


# ---- Pictures


def _odd(record: Record) -> bool:
    return record["shape"][1] * ITEM_BYTES[record["dtype"]] % 16 != 0


def rows_figure(records: list[Record], op: str, title: str):
    """Fraction of the copy rate over row length: one line a peer, odd widths as open markers beside it."""
    dtypes = [d for d in ("bfloat16", "float32") if any(r["dtype"] == d and r["seconds"] for r in records)]
    if not dtypes:
        return None
    size = (6.4 * len(dtypes), 7.4)
    figure, panels = plt.subplots(2, len(dtypes), figsize=size, sharex=True, sharey=True, squeeze=False)
    for row, direction in zip(panels, DIRECTIONS, strict=True):
        for panel, dtype in zip(row, dtypes, strict=True):
            chosen = [r for r in records if (r["dtype"], r["direction"]) == (dtype, direction)]
            for peer in reversed(PEERS):  # ours on top
                points = sorted((r["shape"][1], r["fraction"][peer], _odd(r)) for r in chosen if peer in r["fraction"])
                style = {"color": COLORS[peer], "marker": MARKERS[peer], "markersize": 5}
                panel.plot(*_columns([p for p in points if not p[2]]), linewidth=1.6, clip_on=False, **style)
                panel.plot(
                    *_columns([p for p in points if p[2]]),
                    linestyle="none",
                    markerfacecolor="white",
                    clip_on=False,
                    **style,
                )
            panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
            panel.set_title(f"{dtype}, {direction}", fontsize=11)
            panel.set_xscale("log", base=2)
    lengths = [r["shape"][1] for r in records]
    powers = range(0, max(lengths).bit_length() + 1, 4)
    panels[0, 0].xaxis.set_major_locator(FixedLocator([2.0**p for p in powers]))
    panels[0, 0].xaxis.set_minor_locator(NullLocator())
    panels[0, 0].xaxis.set_major_formatter(FuncFormatter(lambda n, _: _power_label(int(n))))
    panels[0, 0].set_ylim(bottom=0)
    for panel in panels[-1]:
        panel.set_xlabel("columns of a row")
    for panel in panels[:, 0]:
        panel.set_ylabel("fraction of the copy rate")
    handles = [Line2D([], [], color=COLORS[p], marker=MARKERS[p], label=_label(p)) for p in _present(records)]
    open_marker = {"color": "black", "marker": "o", "markerfacecolor": "white", "linestyle": "none"}
    handles.append(Line2D([], [], label="open: not a multiple of 16 bytes", **open_marker))
    _finish(figure, handles, f"{op} along the last axis: {title}")
    return figure


def _columns(points: list[tuple]) -> tuple[list, list]:
    return [p[0] for p in points], [p[1] for p in points]


def _power_label(n: int) -> str:
    if n >= 1 << 20:
        return f"{n >> 20}M"
    return f"{n >> 10}k" if n >= 1 << 10 else str(n)


def _label(peer: str) -> str:
    return "XLA (jax.nn)" if peer == XLA else peer


def _finish(figure, handles: list, title: str) -> None:
    height = figure.get_size_inches()[1]
    figure.suptitle(title, y=1 - 0.12 / height, va="top", in_layout=False)
    top = 1 - 0.35 / height
    legend = figure.legend(
        handles=handles, loc="upper center", ncols=len(handles), frameon=False, bbox_to_anchor=(0.5, top)
    )
    legend.set_in_layout(False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / height))


def _bars(panel, records: list[Record], names: list[str], label: Callable, value: Callable, text: Callable) -> None:
    """Horizontal bars, a group for every name from the top down, a bar for every peer."""
    peers = _present(records)
    found = {label(r): r for r in records}
    height = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        for j, name in enumerate(names):
            record = found.get(name)
            if record is None or peer not in record["seconds"]:
                continue
            y, width = j - 0.4 + (i + 0.5) * height, value(record, peer)
            panel.barh(y, width, height, color=COLORS[peer])
            panel.annotate(
                text(record, peer), (width, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5
            )
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(False, axis="y")


def few_figure(records: list[Record], title: str):
    """Microseconds of a call on few rows."""
    records = [r for r in records if r["seconds"]]
    dtypes = list(dict.fromkeys(r["dtype"] for r in records))
    if not dtypes:
        return None
    names = list(dict.fromkeys(map(_shape, records)))
    size = (5.6 * len(dtypes) + 1, 1.6 + 0.55 * len(names))
    figure, panels = plt.subplots(1, len(dtypes), figsize=size, sharex=True, sharey=True, squeeze=False)
    for panel, dtype in zip(panels[0], dtypes, strict=True):
        chosen = [r for r in records if r["dtype"] == dtype]
        times = lambda r, peer: r["seconds"][peer] * 1e6  # noqa: E731
        _bars(panel, chosen, names, _shape, times, lambda r, peer: _microseconds(r["seconds"][peer]))
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
        panel.set_title(f"{dtype}, forward")
        panel.set_xlabel("µs a call")
    low, high = panels[0, 0].get_xlim()
    shortest = min(s for r in records for s in r["seconds"].values()) * 1e6
    panels[0, 0].set_xlim(min(low, shortest / 2), high * 2)  # room for the figures, and for the shortest bar
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[p], label=_label(p)) for p in _present(records)]
    _finish(figure, handles, f"softmax of few rows: {title}")
    return figure


def axes_figure(records: list[Record], dtype: str, title: str):
    """Fraction of the copy rate for views other than the last axis."""
    records = [r for r in records if r["seconds"]]
    if not records:
        return None
    names = list(dict.fromkeys(map(_view, records)))
    figure, panels = plt.subplots(1, 2, figsize=(13, 1.6 + 0.42 * len(names)), sharex=True, sharey=True)
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        chosen = [r for r in records if r["direction"] == direction]
        _bars(panel, chosen, names, _view, lambda r, p: r["fraction"][p], lambda r, p: f"{r['fraction'][p]:.2f}")
        panel.axvline(1, color="black", linewidth=0.8, linestyle="--")
        panel.set_title(direction)
        panel.set_xlabel("fraction of the copy rate")
    panels[0].set_xlim(0, panels[0].get_xlim()[1] * 1.05)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[p], label=_label(p)) for p in _present(records)]
    _finish(figure, handles, f"softmax of {dtype} along other axes: {title}")
    return figure
