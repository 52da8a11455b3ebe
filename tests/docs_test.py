"""The code in README, docstrings and docs/ runs, and does what they say."""

import glob
import os
import re
import textwrap

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from programs import run_python

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOCS = os.path.join(REPOSITORY, "docs")
PAGES = sorted(os.path.basename(path)
               for path in glob.glob(os.path.join(DOCS, "*.rst")))

HAS_ESTIMATOR = hasattr(tf, "estimator") and tf.__version__ < "2.16"

# Stands for Horovod with one worker.
HOROVOD = """
import sys, types
import tensorflow.compat.v1 as tf
hvd = types.ModuleType("horovod.tensorflow")
hvd.init = lambda: None
hvd.rank = lambda: 0
hvd.allreduce = lambda gradient: tf.identity(gradient, "allreduced")
hvd.broadcast_global_variables = lambda root: tf.no_op()
sys.modules["horovod"] = types.ModuleType("horovod")
sys.modules["horovod"].tensorflow = hvd
sys.modules["horovod.tensorflow"] = hvd
"""


def read(*path):
    with open(os.path.join(REPOSITORY, *path), encoding="utf-8") as file:
        return file.read()


def directives(page, name):
    """Returns the contents of the page's directives, `.. name`."""
    found = re.findall(
        rf"^( *)\.\. {re.escape(name)}\n((?:\1 +.*\n|\n)+)",
        read("docs", page), re.MULTILINE)
    return [textwrap.dedent(content).strip("\n") + "\n"
            for _, content in found]


def run_program(name, folder, *arguments, before=""):
    """Runs a program of docs/migration; returns its last checkpoint."""
    folder.mkdir(exist_ok=True)
    status, output = run_python(
        before + read("docs", "migration", name + ".py"), folder, folder,
        *arguments)
    assert status == 0, output
    return tf.train.latest_checkpoint(str(folder))


def read_checkpoint(path):
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name)
            for name in reader.get_variable_to_shape_map()}


# README.


def readme_blocks():
    """Returns the first example, and the blocks that go on from it."""
    model, ten_lines, *others = re.findall(
        r"^```python\n(.*?)^```$", read("README.md"),
        re.MULTILINE | re.DOTALL)
    return model + ten_lines, others


def test_readme_examples_run(tmp_path):
    first, others = readme_blocks()
    blocks = [""] + [block for block in others
                     if HAS_ESTIMATOR or "tf.estimator" not in block]
    assert len(blocks) > 10
    status, output = run_python(
        "import tensorflow.compat.v1 as tf\n"
        f"for block in {blocks!r}:\n"
        "    with tf.Graph().as_default():\n"
        f"        exec({first!r} + block, {{}})\n"
        "    print('=== ran')\n", tmp_path)
    assert status == 0, output
    assert output.count("=== ran") == len(blocks)


def test_readme_first_example_is_ten_lines_at_most():
    [ten_lines] = re.findall(r"^```python\n(import accumgrad\n.*?)^```$",
                             read("README.md"), re.MULTILINE | re.DOTALL)
    assert len(ten_lines.splitlines()) <= 10


# The site.


def test_pages_with_code():
    # Of migration.rst there are tests of their own below.
    assert [page for page in PAGES
            if directives(page, "code-block:: python")] == [
                "design_parts.rst", "index.rst", "migration.rst"]


@pytest.mark.parametrize("page", ["design_parts.rst", "index.rst"])
def test_code_of_a_page_runs_and_prints_what_stands_below(page, tmp_path):
    [code] = directives(page, "code-block:: python")
    status, output = run_python(code, tmp_path)
    assert status == 0, output
    for text in directives(page, "code-block:: text"):
        assert text in output


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    paths = re.findall(r"(?:literalinclude:: |:diff: |figure:: |image:: )(\S+)"
                       r"|`(\w+/[\w/]+\.\w+)`", read("docs", page))
    for included, named in paths:
        path = (os.path.join("docs", included) if included else named)
        assert os.path.exists(os.path.join(REPOSITORY, path)), path


def test_every_public_name_is_on_the_api_page():
    documented = re.findall(r"^\.\. auto\w+:: (\w+)$",
                            read("docs", "api.rst"), re.MULTILINE)
    assert sorted(documented) == accumgrad.__all__


# The migration guide.


def test_from_the_recipe(tmp_path):
    before = read_checkpoint(run_program("recipe_before",
                                         tmp_path / "before"))
    after = read_checkpoint(run_program("recipe_after", tmp_path / "after"))
    # The recipe's sum is saved with the model.
    assert set(before) - set(after) == {"Variable"}
    assert {"weights", "weights/Adam"} < set(after) < set(before)
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name], name)


def test_old_checkpoint_of_the_recipe_restores(tmp_path):
    path = run_program("recipe_before", tmp_path / "before")
    expected = read_checkpoint(path)
    with tf.Graph().as_default(), tf.Session() as session:
        weights = tf.get_variable("weights", [3, 1])
        accumgrad.build_accumulation_ops(
            tf.reduce_sum(weights), tf.train.AdamOptimizer(0.1))
        tf.train.Saver().restore(session, path)
        for variable in tf.global_variables():
            np.testing.assert_array_equal(session.run(variable),
                                          expected[variable.op.name])


def test_from_a_tf_cond_wrapper(tmp_path):
    before = read_checkpoint(run_program("tf_cond_before",
                                         tmp_path / "before"))
    after = read_checkpoint(run_program("tf_cond_after", tmp_path / "after"))
    renamed = {re.sub("^cond/", "", name): value
               for name, value in before.items()}
    assert set(before) - set(after) == {"sum_0", "micro_step",
                                        "cond/beta1_power",
                                        "cond/beta2_power"}
    assert set(after) < set(renamed)
    assert after["global_step"] == 10
    for name, value in after.items():
        np.testing.assert_array_equal(value, renamed[name], name)


def test_old_checkpoint_of_a_tf_cond_wrapper_restores(tmp_path):
    path = run_program("tf_cond_before", tmp_path / "before")
    expected = read_checkpoint(path)
    [code] = directives("migration.rst", "code-block:: python")
    with tf.Graph().as_default(), tf.Session() as session:
        weights = tf.get_variable("weights", [3, 1])
        accumgrad.AccumulatingOptimizer(tf.train.AdamOptimizer(0.1)).minimize(
            tf.reduce_sum(weights), tf.train.get_or_create_global_step())
        exec(code, {"tf": tf, "session": session, "old_checkpoint": path})
        for variable in tf.global_variables():
            name = variable.op.name
            np.testing.assert_array_equal(
                session.run(variable),
                expected.get(name, expected.get("cond/" + name)))


def test_from_horovod(tmp_path):
    program = read("docs", "migration", "horovod_after.py")
    [diff] = directives("migration.rst", "code-block:: diff")
    added = "".join(line[1:] + "\n" for line in diff.splitlines()
                    if line.startswith("+"))
    assert added.strip() in program
    found = read_checkpoint(run_program("horovod_after", tmp_path,
                                        before=HOROVOD))
    # Adam by hand, of the sums of eight gradients.
    xs = np.random.RandomState(0).randn(10, 8, 3)
    weights = np.zeros([3])
    first, second = np.zeros([3]), np.zeros([3])
    for t, x in enumerate(xs, 1):
        gradient = 2 * x.T @ (x @ weights - x.sum(axis=1))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient ** 2
        weights -= (0.1 * np.sqrt(1 - 0.999 ** t) / (1 - 0.9 ** t)
                    * first / (np.sqrt(second) + 1e-8))
    assert found["global_step"] == 10
    np.testing.assert_allclose(found["weights"][:, 0], weights, 1e-5)


@pytest.mark.skipif(not HAS_ESTIMATOR,
                    reason="TensorFlow 2.16 dropped tf.estimator")
def test_from_an_estimator(tmp_path):
    def train(which, folder, steps):
        return read_checkpoint(run_program("estimator_" + which,
                                           tmp_path / folder, steps))
    before, after = train("before", "a", 20), train("after", "b", 20)
    assert set(after) == set(before)
    for name, value in before.items():
        # float32, sums in another order, through 20 updates.
        np.testing.assert_allclose(after[name], value, 1e-4, 1e-6, name)
    # Each goes on from what the other saved.
    assert train("before", "b", 30)["global_step"] == 30
    assert train("after", "a", 30)["global_step"] == 30


# Docstrings.


def docstring_examples():
    """Returns the code in the docstrings of all that is public."""
    documented = []
    for name in accumgrad.__all__:
        public = getattr(accumgrad, name)
        documented.append(public)
        if isinstance(public, type):
            documented.extend(vars(public).values())
    return [textwrap.dedent(code) for thing in documented
            for code in re.findall(r"::\n\n((?: +.*\n|\n)+?)(?=\n    \S)",
                                   getattr(thing, "__doc__", None) or "")]


def test_docstring_examples_run(tmp_path):
    first, _ = readme_blocks()
    examples = docstring_examples()
    assert len(examples) >= 5
    status, output = run_python(
        "import tensorflow.compat.v1 as tf\n"
        f"for example in {examples!r}:\n"
        "    with tf.Graph().as_default():\n"
        "        names = {}\n"
        f"        exec({first!r}, names)\n"
        "        exec('optimizer = tf.train.AdamOptimizer()', names)\n"
        "        exec('from accumgrad import run_cycles', names)\n"
        "        exec('feeds = iter([{x: xs[0], y: ys[0]}] * 3)', names)\n"
        "        exec(example, names)\n"
        "    print('=== ran')\n", tmp_path)
    assert status == 0, output
    assert output.count("=== ran") == len(examples)
