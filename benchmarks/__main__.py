"""Measures accumgrad against the recipe, and prints tables.

    python -m benchmarks --json results.json --plot results.png

Every contender runs in a process of its own, in turn, round after round.  It
takes hours at full size; `--quick` shows in minutes that all of it runs.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys

from benchmarks import cases
from benchmarks import report

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# The defaults with `--quick`.
QUICK = {"cases": cases.QUICK_CASES, "micro_batches": 4, "rounds": 1,
         "timed": 2, "seconds": 0.0}


def parse_options(arguments=None):
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures time and peak memory of gradient accumulation, "
        "each contender in a process of its own.")
    add = parser.add_argument
    add("--cases", nargs="+", choices=tuple(cases.CASES), metavar="CASE",
        default=tuple(cases.CASES),
        help="what to train: %(choices)s; default: all")
    add("--contenders", nargs="+", choices=cases.CONTENDERS, metavar="HOW",
        default=cases.CONTENDERS,
        help="what to compare: %(choices)s; default: all")
    add("--micro-batches", type=_positive, default=128, metavar="N",
        help="in a cycle; default: %(default)s")
    add("--rounds", type=_positive, default=3, metavar="N",
        help="processes for each contender, in turn with the others; "
        "default: %(default)s")
    add("--timed", type=_positive, default=6, metavar="N",
        help="micro-batches a round, where a whole cycle takes minutes and "
        "need not be run; default: %(default)s")
    add("--seconds", type=float, default=5.0,
        help="of whole cycles a round, where they are run, one at least; "
        "default: %(default)s")
    add("--image-size", type=_positive, default=224, metavar="PIXELS",
        help="of the demo's VGG-16; default: %(default)s")
    add("--long", action="store_true",
        help="measure cycles of up to 10,000 micro-batches instead")
    add("--quick", action="store_true",
        help="all but tf-slim's VGG-16 small and once, to see that it runs")
    add("--from", "--plot-from", nargs="+", metavar="FILE", dest="files",
        help="measure nothing, but take what --json wrote")
    add("--json", metavar="FILE", help="write what was measured")
    add("--plot", metavar="FILE",
        help="draw time and memory as fractions of the recipe's")
    add("--markdown", metavar="FILE",
        help="write the tables; into a file that has them, in their place")
    add("--readme", metavar="FILE",
        help="write a small table of ratios in the same way")
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**QUICK)
        options = parser.parse_args(arguments)
    _check_plot(parser, options)
    return options


def _check_plot(parser, options):
    # Before hours of measuring, not after them.
    if not options.plot:
        return
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: it needs matplotlib")
    if not options.files and (options.long or len(options.contenders) < 2
                              or "recipe" not in options.contenders):
        parser.error("argument --plot: it draws the recipe against others, "
                     "and not all of them are measured")


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def run_benchmarks(options):
    """Measures what the options ask for, and prints a table after each case.

    Returns:
        Dict, as `--json` writes it: `environment`, `micro_batches`, and
        `cases` or `long`, a list of dicts with `name`, `title` and `rounds`.
    """
    results = {"environment": describe_machine(),
               "micro_batches": options.micro_batches,
               "cases": [], "long": []}
    if options.long:
        names, run_case = list(cases.LONG_CASES), run_long_case
        measured, make_table = results["long"], report.long_table
    else:
        names, run_case = options.cases, run_cycle_case
        measured, make_table = results["cases"], report.case_table
    for name in names:
        measured.append(run_case(name, options))
        if name == names[0]:
            results["environment"].update(_versions(measured[0]))
            print(report.header(results) + "\n")
        print(report.text(make_table(measured[-1])) + "\n", flush=True)
        # After every case: the next may take hours, or all the memory.
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)
    for note in report.notes(results):
        print(note + "\n")
    return results


def run_cycle_case(name, options):
    """Measures every contender at one case."""
    case = cases.CASES[name]
    sizes = _sizes(case, options)
    jobs = {contender: {"case": name, "contender": contender, "sizes": sizes,
                        "num_micro_batches": options.micro_batches,
                        "num_timed": options.timed,
                        "seconds": options.seconds}
            for contender in options.contenders}
    return {"name": name, "title": _title(case, sizes),
            "rounds": run_rounds(name, jobs, options.rounds)}


def run_long_case(name, options):
    """Measures cycles of each length at one case."""
    case = cases.LONG_CASES[name]
    sizes = _sizes(case, options)
    lengths = cases.QUICK_LENGTHS if options.quick else cases.LONG_LENGTHS
    jobs = {str(length): {"case": name, "contender": "auto", "sizes": sizes,
                          "num_micro_batches": length,
                          "num_timed": length, "seconds": options.seconds}
            for length in lengths}
    rounds = run_rounds(name, jobs, options.rounds)
    return {"name": name, "title": _title(case, sizes), "rounds": rounds}


def run_rounds(name, jobs, num_rounds):
    """Runs the jobs in turn, round after round.

    Args:
        name: Of the case, for the lines that tell how far it is.
        jobs: Dict of dicts that measure.py takes.
        num_rounds: How often to run them all.

    Returns:
        List of `num_rounds` dicts of results, with the keys of `jobs`.
    """
    rounds = []
    for number in range(1, num_rounds + 1):
        rounds.append({})
        for key, job in jobs.items():
            print(f"{name}, round {number} of {num_rounds}: {key}",
                  file=sys.stderr, flush=True)
            rounds[-1][key] = run_process(job)
    return rounds


def run_process(job):
    """Runs measure.py in a new process; returns the dict that it prints."""
    environment = dict({"TF_CPP_MIN_LOG_LEVEL": "3"}, **os.environ)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.measure",
         json.dumps(job)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, universal_newlines=True)
    output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{job} ended with status {process.returncode}, "
                         f"negative if killed by a signal:\n{errors}")
    return json.loads(output.splitlines()[-1])


def describe_machine():
    """Returns what the figures depend on, but TensorFlow: a dict."""
    return {"cores": os.cpu_count(), "cpu": _cpu_model(),
            "date": datetime.date.today().isoformat()}


def _cpu_model():
    try:
        with open("/proc/cpuinfo") as file:
            return re.search(r"^model name\s*: (.*)$", file.read(),
                             re.MULTILINE).group(1)
    except (OSError, AttributeError):
        return platform.processor() or "unknown processor"


def _sizes(case, options):
    sizes = dict(case.sizes)
    if options.quick:
        sizes.update(case.quick_sizes)
    elif "image_size" in sizes:
        sizes["image_size"] = options.image_size
    return sizes


def _versions(measured):
    # As the processes tell: TensorFlow is not to be imported in this one.
    result = next(iter(measured["rounds"][0].values()))
    return {name: result[name] for name in ("tensorflow", "python")}


def _title(case, sizes):
    return f"{case.title.format(**sizes)}, {case.optimizer}"


def main(arguments=None):
    """Runs the program; `arguments` are those of the command line."""
    options = parse_options(arguments)
    if options.files:
        everything = []
        for path in options.files:
            with open(path) as file:
                everything.append(json.load(file))
            print(report.whole_text(everything[-1]) + "\n")
    else:
        everything = [run_benchmarks(options)]
    everything = report.merge(everything)
    names = list(cases.CASES)
    for results in everything:
        results["cases"].sort(key=lambda case: names.index(case["name"]))
    if options.plot:
        report.plot(options.plot, everything)
    if options.markdown:
        report.write_markdown(options.markdown, everything)
    if options.readme:
        report.write_short_markdown(options.readme, everything)


if __name__ == "__main__":
    main()
