"""Makes tables and a plot of what was measured.

It takes the dicts that `python -m benchmarks --json` writes, and knows
nothing of how they came about.
"""

import os
import statistics
import textwrap
from typing import List, NamedTuple

# Between these two lines of a file, the tables are written anew.
BEGIN = "<!-- begin: written by `python -m benchmarks --markdown` -->"
END = "<!-- end -->"

CYCLE_HEADER = ("contender", "a micro-batch", "train_op", "a cycle",
                "peak memory", "auto / it, time", "auto / it, memory",
                "the cycle is")
CYCLE_NOTE = (
    "A cycle is zero_ops, {micro_batches} micro-batches and train_op; for "
    "`gradients`, which accumulates nothing, the micro-batches alone. In each "
    "round each contender runs in a process of its own, in turn with the "
    "others; what is shown is the median over the rounds. A micro-batch is "
    "the median of those that were timed. Where whole cycles were measured, "
    "the cycle is their median; elsewhere it is computed from three medians "
    "that were measured, as zero_ops + {micro_batches} x a micro-batch + "
    "train_op. Memory is the process's peak resident set size in MB of 2^20 "
    "bytes, TensorFlow's own included. Ratios are taken within a round.")

SHORT_HEADER = ("`auto`, as a fraction of", "the recipe's time", "memory",
                "the gradients' time", "memory")

LONG_HEADER = ("micro-batches", "median", "mean", "mean of all", "train_op",
               "accumulating", "train_op included", "dense accumulator")
LONG_NOTE = (
    "Long cycles are of `auto`, each length in a process of its own. Median "
    "and mean are of a micro-batch in the second half of the cycle, mean of "
    "all in the whole of it; folding is in both means. Memory is by how much "
    "the process's peak resident set size grew beyond what it was after a "
    "cycle of 2 micro-batches: until the last micro-batch of the first cycle, "
    "and until the end, train_op included; in MB of 2^20 bytes.")


# Colours that stay apart in grey, and hatching beside them.
_BARS = {"gradients": ("#bdbdbd", ""), "dense": ("#9ecae1", "///"),
         "auto": ("#08519c", "")}


class Table(NamedTuple):
    """A table: title, header, and rows of as many strings."""
    title: str
    header: tuple
    rows: List[tuple]


def header(results):
    """Returns the line that says where it was measured."""
    return ("TensorFlow {tensorflow}, Python {python}, {cores} cores "
            "({cpu}), {date}".format(**results["environment"]))


def case_table(measured):
    """Returns the `Table` of one case."""
    return Table(measured["title"], CYCLE_HEADER, [
        _case_row(measured["rounds"], contender)
        for contender in measured["rounds"][0]])


def long_table(measured):
    """Returns the `Table` of one case of long cycles."""
    return Table(measured["title"], LONG_HEADER, [
        _long_row(measured, length) for length in measured["rounds"][0]])


def notes(results):
    """Returns paragraphs that say what the tables' figures are."""
    paragraphs = []
    if results["cases"]:
        paragraphs.append(CYCLE_NOTE.format(**results))
    if results["long"]:
        paragraphs.append(LONG_NOTE)
    return paragraphs


def text(table):
    """Returns the table for a terminal."""
    rows = [table.header] + table.rows
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join([table.title, ""] + [
        "  ".join(cell.ljust(width) if column in (0, len(row) - 1)
                  else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths)))
        .rstrip() for row in rows])


def whole_text(results):
    """Returns header, tables and notes for a terminal."""
    return "\n\n".join(
        [header(results)] + [text(table) for table in _tables(results)]
        + [textwrap.fill(note, 79) for note in notes(results)])


def write_markdown(path, everything):
    """Writes the tables of several results to a file.

    Where the file has the two lines `BEGIN` and `END`, what is between them
    is replaced; otherwise they and the tables are all that it will have.
    """
    _write_between(path, _markdown(everything))


def write_short_markdown(path, everything):
    """Writes one small table of ratios for each environment to a file.

    In the place of what the file has between the lines `BEGIN` and `END`.
    """
    _write_between(path, "\n\n".join(
        part for results in everything for part in (
            header(results) + ":",
            "\n".join(_markdown_lines(short_table(results))))))


def short_table(results):
    """Returns the `Table` of what `auto` takes, against the others."""
    return Table("", SHORT_HEADER, [
        (measured["title"],
         *(f"{_ratio(measured['rounds'], 'auto', other, quantity):.3f}"
           for other in ("recipe", "gradients")
           for quantity in ("cycle_s", "peak_mb")))
        for measured in results["cases"]
        if {"auto", "recipe", "gradients"} <= set(measured["rounds"][0])])


def merge(everything):
    """Returns the results with those of one environment in one.

    Of the same machine, TensorFlow and number of micro-batches, that is; what
    is kept of the date is the first.
    """
    merged = {}
    for results in everything:
        key = (results["micro_batches"],) + tuple(
            results["environment"][name]
            for name in ("tensorflow", "python", "cores", "cpu"))
        kept = merged.setdefault(key, dict(results, cases=[], long=[]))
        for kind in ("cases", "long"):
            kept[kind] = kept[kind] + results[kind]
    return list(merged.values())


def plot(path, everything):
    """Draws time and memory of all cases, as fractions of the recipe's.

    Args:
        path: File to write; its ending says in which format.
        everything: List of results; a row of the figure for each that has the
            recipe and another contender.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: None has.
    """
    everything = [results for results in everything if _plotted(results)]
    if not everything:
        raise ValueError("there is no case with both the recipe and another "
                         "contender")
    from matplotlib.backends import backend_agg
    from matplotlib.figure import Figure

    heights = [len(_plotted(results)) for results in everything]
    figure = Figure(figsize=(10, 1.2 * len(heights) + 0.75 * sum(heights)),
                    dpi=150)
    backend_agg.FigureCanvasAgg(figure)
    rows = figure.subplots(len(heights), 2, squeeze=False,
                           gridspec_kw={"height_ratios": heights})
    for (time_axes, memory_axes), results in zip(rows, everything):
        _plot_ratios(time_axes, results, "cycle_s", "time of a cycle")
        _plot_ratios(memory_axes, results, "peak_mb", "peak resident memory")
        memory_axes.set_yticklabels([])
        time_axes.set_title(
            "TensorFlow {tensorflow}".format(**results["environment"]),
            loc="left")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels),
                  frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    figure.savefig(path)


def _write_between(path, text):
    before, after = "", ""
    if os.path.exists(path):
        with open(path) as file:
            old = file.read()
        if BEGIN in old and END in old:
            before = old[:old.index(BEGIN)]
            after = old[old.index(END) + len(END):]
    with open(path, "w") as file:
        file.write(before + BEGIN + "\n\n" + text + "\n\n" + END
                   + (after or "\n"))


def _tables(results):
    return ([case_table(measured) for measured in results["cases"]]
            + [long_table(measured) for measured in results["long"]])


def _markdown(everything):
    parts = []
    for results in everything:
        parts.append("### " + header(results))
        for table in _tables(results):
            parts.append(table.title[0].upper() + table.title[1:] + ":")
            parts.append("\n".join(_markdown_lines(table)))
    # Each once, however many results share it.
    shared = {note: None for results in everything for note in notes(results)}
    return "\n\n".join(parts + [textwrap.fill(note, 79) for note in shared])


def _markdown_lines(table):
    lines = [table.header] + [("---",) + ("---:",) * (len(table.header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in lines + table.rows]


def _case_row(rounds, contender):
    ratios = ("", "")
    if contender != "auto" and "auto" in rounds[0]:
        ratios = tuple(f"{_ratio(rounds, 'auto', contender, quantity):.3f}"
                       for quantity in ("cycle_s", "peak_mb"))
    return (contender,
            *(_seconds_text(_median(rounds, contender, quantity))
              for quantity in ("micro_batch_s", "apply_s", "cycle_s")),
            f"{_median(rounds, contender, 'peak_mb'):.0f} MB",
            *ratios, _provenance([one[contender] for one in rounds]))


def _provenance(processes):
    """Says what a contender's cycle was measured or computed from."""
    num_whole = sum(process["num_whole_cycles"] for process in processes)
    if num_whole:
        return f"measured, {num_whole} whole"
    num_timed = sum(process["num_timed"] for process in processes)
    return f"computed, {num_timed} micro-batches timed"


def _long_row(measured, length):
    rounds = measured["rounds"]

    def growth(quantity):
        grown = statistics.median(
            one[length][quantity] - one[length]["warm_mb"] for one in rounds)
        return f"{grown:+.0f} MB"
    return (length,
            *(_seconds_text(_median(rounds, length, quantity))
              for quantity in ("late_median_s", "late_mean_s",
                               "micro_batch_mean_s", "apply_s")),
            growth("accumulated_mb"), growth("peak_mb"),
            f"{_median(rounds, length, 'dense_mb'):.0f} MB")


def _median(rounds, contender, quantity):
    return statistics.median(one[contender][quantity] for one in rounds)


def _ratio(rounds, contender, other, quantity):
    return statistics.median(
        one[contender][quantity] / one[other][quantity] for one in rounds)


def _seconds_text(seconds):
    if not seconds:
        return "none"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _plotted(results):
    """Returns the cases that have the recipe, and another contender."""
    return [measured for measured in results["cases"]
            if "recipe" in measured["rounds"][0]
            and len(measured["rounds"][0]) > 1]


def _plot_ratios(axes, results, quantity, label):
    plotted = _plotted(results)
    contenders = [name for name in _BARS
                  if any(name in measured["rounds"][0]
                         for measured in plotted)]
    height = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        color, hatch = _BARS[contender]
        bars = [(case + (number - (len(contenders) - 1) / 2) * height,
                 _ratio(measured["rounds"], contender, "recipe", quantity),
                 _median(measured["rounds"], contender, quantity))
                for case, measured in enumerate(plotted)
                if contender in measured["rounds"][0]]
        places, ratios, _ = zip(*bars)
        axes.barh(places, ratios, height, color=color, hatch=hatch,
                  edgecolor="black", linewidth=0.5, label=contender)
        for place, ratio, value in bars:
            axes.annotate(
                f"{ratio:.2g} ({_value_text(value, quantity)})",
                (ratio, place), (3, 0), textcoords="offset points",
                va="center", fontsize=8,
                # Over the recipe's line.
                bbox={"color": "white", "pad": 0.5})
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1,
                 label="the recipe")
    axes.set_yticks(range(len(plotted)))
    axes.set_yticklabels([measured["name"] for measured in plotted])
    axes.invert_yaxis()
    axes.set_xlabel(f"{label}, as a fraction of the recipe's")
    # Room for what is written at the ends of the bars.
    axes.set_xlim(0, 1.25 * max(axes.get_xlim()[1], 1.0))


def _value_text(value, quantity):
    return (_seconds_text(value) if quantity == "cycle_s"
            else f"{value:.0f} MB")
