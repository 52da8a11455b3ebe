"""Tests of benchmarks/, at sizes that take no time."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# At the end: accumgrad is to stay the one that is installed.
sys.path.append(REPOSITORY)

from benchmarks import cases  # noqa: E402
from benchmarks import contenders  # noqa: E402
from benchmarks import measure  # noqa: E402
from benchmarks import models  # noqa: E402
from benchmarks import report  # noqa: E402

SMALL_CASES = ["embedding-adagrad", "embedding-momentum", "perceptron",
               "transformer"]

# The recipe asks for reference variables: `initialized_value()`.
as_in_v1 = pytest.mark.parametrize("behavior", ["v1"], indirect=True)


def quick_sizes(case):
    return dict(case.sizes, **case.quick_sizes)


def train(case, contender, num_micro_batches=3, num_cycles=2):
    """Returns the variables' values after that, in the order of names."""
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        model = getattr(models, case.model)(**quick_sizes(case))
        cycles = getattr(contenders, contender)(
            model.loss, models.OPTIMIZERS[case.optimizer]())
        feeds = itertools.cycle(model.make_feeds(num_micro_batches))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(tf.trainable_variables())
            for _ in zip(range(num_cycles), cycles(
                    session, feeds, lambda index: num_micro_batches)):
                pass
            return before, session.run(tf.trainable_variables())


def run_program(*arguments):
    """Runs the program in a new process; returns what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks"] + list(arguments),
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        universal_newlines=True)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


# What is measured


@as_in_v1
@pytest.mark.parametrize("name", SMALL_CASES)
def test_contenders_make_the_updates_that_the_recipe_makes(behavior, name):
    case = cases.CASES[name]
    before, by_recipe = train(case, "recipe")
    assert any((old != new).any() for old, new in zip(before, by_recipe))
    for value, expected in zip(train(case, "dense")[1], by_recipe):
        np.testing.assert_array_equal(value, expected)
    # float32, and sums of three terms in another order.
    for value, expected in zip(train(case, "auto")[1], by_recipe):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@as_in_v1
@pytest.mark.parametrize("name", SMALL_CASES)
def test_gradients_alone_change_no_variable(behavior, name):
    before, after = train(cases.CASES[name], "gradients")
    for value, expected in zip(after, before):
        np.testing.assert_array_equal(value, expected)


@as_in_v1
@pytest.mark.parametrize("name, deferred, op_type", [
    ("vgg16", ["fc6/weights", "fc7/weights"], "MatMul"),
    ("vgg16-towers", ["towers/fc6/weights", "towers/fc7/weights"],
     "MatMul + MatMul + MatMul"),
    ("slim", ["vgg_16/fc6/weights", "vgg_16/fc7/weights"],
     "Conv2DBackpropFilter + constant"),
    ("slim-towers", ["towers/vgg_16/fc6/weights", "towers/vgg_16/fc7/weights"],
     " + ".join(["Conv2DBackpropFilter"] * 3 + ["constant"])),
])
def test_large_layers_of_vgg16_are_deferred(graph, name, deferred, op_type):
    case = cases.CASES[name]
    model = getattr(models, case.model)(**case.sizes)
    ops = accumgrad.build_accumulation_ops(
        model.loss, models.OPTIMIZERS[case.optimizer]())
    contractions = [item for item in accumgrad.describe_accumulators(ops)
                    if item.form == "contraction"]
    assert [item.variable for item in contractions] == deferred
    assert [item.reason for item in contractions] == [op_type] * 2


@pytest.mark.parametrize(
    "case", list(cases.CASES.values()) + list(cases.LONG_CASES.values()))
def test_a_case_names_a_model_its_sizes_and_an_optimizer(case):
    code = getattr(models, case.model).__code__
    assert set(case.sizes) == set(code.co_varnames[:code.co_argcount])
    assert set(case.quick_sizes) <= set(case.sizes)
    assert case.optimizer in models.OPTIMIZERS


# How it is measured


def test_a_cycle_is_split_where_its_runs_begin():
    assert measure._parts([0.0, 1.0, 3.0, 6.0], 10.0, 2) == (
        1.0, [2.0, 3.0], 4.0)
    assert measure._parts([0.0, 1.0], 3.0, 2) == (0.0, [1.0, 2.0], 0.0)


@as_in_v1
@pytest.mark.parametrize("contender", cases.CONTENDERS)
def test_of_a_costly_case_only_auto_runs_whole_cycles(graph, contender):
    case = cases.CASES["perceptron"]._replace(costly=True)
    result = measure.measure(case, contender, {"hidden_size": 4},
                             num_micro_batches=7, num_timed=3, seconds=0.0)
    if contender == "auto":
        assert (result["num_timed"], result["num_whole_cycles"]) == (7, 1)
    else:
        assert (result["num_timed"], result["num_whole_cycles"]) == (3, 0)
        assert result["cycle_s"] == (
            result["zero_s"] + 7 * result["micro_batch_s"]
            + result["apply_s"])
    assert (result["zero_s"] > 0) == (contender != "gradients")
    # Weights and biases, float32.
    assert result["dense_mb"] * 2 ** 20 == 4 * (785 * 4 + 5 * 4 + 5 * 10)
    assert (result["initialized_mb"] <= result["warm_mb"]
            <= result["accumulated_mb"] <= result["peak_mb"])


@as_in_v1
def test_cycles_are_run_for_as_long_as_is_asked(graph):
    result = measure.measure(cases.CASES["perceptron"], "dense",
                             {"hidden_size": 4}, num_micro_batches=2,
                             num_timed=1, seconds=0.2)
    assert result["num_whole_cycles"] > 1
    assert result["num_timed"] == 2 * result["num_whole_cycles"]


def test_the_process_that_starts_the_others_has_no_tensorflow():
    subprocess.check_call(
        [sys.executable, "-c", "import sys, benchmarks.__main__\n"
         "assert not {'tensorflow', 'numpy'} & set(sys.modules)"],
        cwd=REPOSITORY)


# What is reported


def result(cycle_s, peak_mb, num_whole_cycles):
    return {"cycle_s": cycle_s, "peak_mb": peak_mb, "micro_batch_s": 0.012,
            "apply_s": 0.0, "num_whole_cycles": num_whole_cycles,
            "num_timed": 6}


@pytest.fixture
def results():
    """Three rounds, in the second of which the machine was slow."""
    rounds = [{"recipe": result(4.0, 500.0, 0), "auto": result(1.0, 250.0, 1)},
              {"recipe": result(40.0, 520.0, 0), "auto": result(8.0, 240., 1)},
              {"recipe": result(3.0, 510.0, 0), "auto": result(1.5, 260., 1)}]
    return {"environment": {"tensorflow": "1.15.5", "python": "3.7.16",
                            "cores": 2, "cpu": "Some CPU",
                            "date": "2026-01-31"},
            "micro_batches": 128, "long": [],
            "cases": [{"name": "vgg16", "title": "some network",
                       "rounds": rounds}]}


def test_table_has_medians_and_medians_of_ratios_within_a_round(results):
    table = report.case_table(results["cases"][0])
    assert table.title == "some network"
    assert table.rows == [
        ("recipe", "12 ms", "none", "4.00 s", "510 MB", "0.250", "0.500",
         "computed, 18 micro-batches timed"),
        ("auto", "12 ms", "none", "1.50 s", "250 MB", "", "",
         "measured, 3 whole"),
    ]


def test_markdown_goes_in_the_place_of_what_was_there(results, tmp_path):
    path = str(tmp_path / "README.md")
    with open(path, "w") as file:
        file.write(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_markdown(path, [results, results])
    with open(path) as file:
        text = file.read()
    report.write_markdown(path, [results, results])
    with open(path) as file:
        assert file.read() == text
    assert text.startswith(f"before\n{report.BEGIN}\n\n### TensorFlow 1.15.5")
    assert text.endswith(f"\n\n{report.END}\nafter\n")
    assert "old" not in text
    assert text.count("| auto | 12 ms | none | 1.50 s | 250 MB |") == 2
    # The note that both share.
    assert text.count("2^20 bytes") == 1


def test_short_table_has_the_ratios_of_auto(results, tmp_path):
    # Only of a case in which it stands against both.
    assert report.short_table(results).rows == []
    for one, cycle_s in zip(results["cases"][0]["rounds"], (2.0, 4.0, 3.0)):
        one["gradients"] = result(cycle_s, 1000.0, 0)
    # 1 / 2, 8 / 4, 1.5 / 3; 250, 240 and 260 of 1000.
    assert report.short_table(results).rows == [
        ("some network", "0.250", "0.500", "0.500", "0.250")]
    path = str(tmp_path / "README.md")
    report.write_short_markdown(path, [results])
    with open(path) as file:
        text = file.read()
    assert "| some network | 0.250 | 0.500 | 0.500 | 0.250 |" in text


def test_results_of_one_environment_are_merged(results):
    newer = dict(results, environment=dict(results["environment"],
                                           tensorflow="2.21.0"))
    later = dict(results, environment=dict(results["environment"],
                                           date="2026-02-01"))
    merged = report.merge([results, newer, later])
    assert [(one["environment"]["tensorflow"], one["environment"]["date"],
             len(one["cases"])) for one in merged] == [
        ("1.15.5", "2026-01-31", 2), ("2.21.0", "2026-01-31", 1)]
    assert len(results["cases"]) == 1


def test_plot_is_drawn_of_what_has_the_recipe(results, tmp_path):
    path = tmp_path / "plot.png"
    report.plot(str(path), [results])
    assert path.read_bytes().startswith(b"\x89PNG")
    for one in results["cases"][0]["rounds"]:
        del one["recipe"]
    with pytest.raises(ValueError, match="no case with both the recipe"):
        report.plot(str(path), [results])


def test_program_measures_and_reports(tmp_path):
    file, plot, again = [str(tmp_path / name)
                         for name in ("r.json", "r.png", "again.png")]
    output = run_program("--quick", "--cases", "perceptron", "--contenders",
                         "recipe", "auto", "--json", file, "--plot", plot)
    lines = output.splitlines()
    assert lines[0].startswith(f"TensorFlow {tf.__version__}, Python ")
    assert [line.split()[0] for line in lines if line][2:5] == [
        "contender", "recipe", "auto"]
    with open(file) as opened:
        results = json.load(opened)
    (case,) = results["cases"]
    (one,) = case["rounds"]
    for contender in ("recipe", "auto"):
        # TensorFlow takes more, and less than this test and its parents.
        assert 50 < one[contender]["peak_mb"] < 2000
        assert one[contender]["num_whole_cycles"] == 1
        assert one[contender]["num_timed"] == results["micro_batches"] == 4
    # The same tables, of what was written.
    redrawn = run_program("--from", file, "--plot", again)
    assert redrawn.split() == output.split()
    with open(plot, "rb") as first, open(again, "rb") as second:
        assert first.read() == second.read()


@pytest.mark.parametrize("arguments, message", [
    (["--rounds", "0"], "argument --rounds: must be at least 1; got 0"),
    (["--contenders", "auto", "--plot", "plot.png"],
     "argument --plot: it draws the recipe against others"),
])
def test_program_refuses_before_it_measures(arguments, message):
    with pytest.raises(AssertionError, match=message):
        run_program(*arguments)
