"""What holds of the package as a whole: names, layers, import, documents."""

import ast
import os
import re
import types

import pytest

import accumgrad
from programs import run_python

PACKAGE = os.path.dirname(os.path.abspath(accumgrad.__file__))
REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODULES = sorted(name[:-len(".py")] for name in os.listdir(PACKAGE)
                 if name.endswith(".py"))

# What each module may import of ours; "accumgrad" is the public package.
BELOW_BUILDER = {"accumulators", "checks", "cycle", "graph_reading"}
MAY_IMPORT = {
    "__init__": set(MODULES),
    "demo": {"accumgrad"},
    "session_loop": {"checks"},
    "optimizer": {"builder", "describe", "hooks"} | BELOW_BUILDER,
    "hooks": set(),
    "micro_batching": {"builder"} | BELOW_BUILDER,
    "builder": BELOW_BUILDER | {"describe"},
    "cycle": {"accumulators", "checks", "update_ops"},
    "update_ops": {"accumulators", "graph_reading"},
    "transforms": set(),
    "accumulators": {"contractions", "checks", "graph_reading"},
    "contractions": {"graph_reading"},
    "graph_reading": set(),
    "describe": set(),
    "checks": set(),
    "requirements": set(),
    "annotations": set(),
}


def _read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def _parse(module):
    return ast.parse(_read(PACKAGE, module + ".py"))


def _imports(tree):
    """Yields the dotted name of everything that `tree` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield "." * node.level + f"{node.module}.{alias.name}"


def _our_imports(tree):
    for name in _imports(tree):
        first, _, rest = name.partition(".")
        if first == "accumgrad":
            module = rest.partition(".")[0]
            yield module if module in MODULES else "accumgrad"


def _dotted(node):
    """Returns `a.b.c` for the expression a.b.c, otherwise None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and _dotted(node.value):
        return f"{_dotted(node.value)}.{node.attr}"
    return None


def test_newest_changelog_heading_is_the_version():
    headings = re.findall(r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$",
                          _read(REPOSITORY, "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == accumgrad.__version__


def test_all_is_what_is_public():
    public = {name for name, value in vars(accumgrad).items()
              if not name.startswith("_")
              and not isinstance(value, types.ModuleType)}
    # The check has done its work when the import is over.
    assert public - {"check_tensorflow"} == set(accumgrad.__all__)
    assert accumgrad.__all__ == sorted(accumgrad.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_module_opens_with_a_docstring(module):
    assert ast.get_docstring(_parse(module))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    assert set(_our_imports(_parse(module))) <= (
        MAY_IMPORT[module] | {"annotations"})


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_absolute_and_of_public_tensorflow(module):
    for name in _imports(_parse(module)):
        assert not name.startswith(".")
        if name.startswith("tensorflow"):
            assert name in ("tensorflow", "tensorflow.compat.v1")


@pytest.mark.parametrize("module", MODULES)
def test_names_are_of_public_tensorflow(module):
    names = {_dotted(node) or "" for node in ast.walk(_parse(module))}
    assert not [name for name in names if re.match(
        r"(tf|tensorflow)(\.compat\.v1)?\.(python|contrib)\b", name)]


@pytest.mark.parametrize("module",
                         sorted(set(MODULES)
                                - {"session_loop", "hooks", "demo"}))
def test_session_loop_and_hooks_alone_run_sessions(module):
    attributes = {node.attr for node in ast.walk(_parse(module))
                  if isinstance(node, ast.Attribute)}
    assert not attributes & {"run", "make_callable", "run_step_fn"}


def test_import_without_tensorflow_says_what_to_install(tmp_path):
    status, output = run_python(
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"
        "import accumgrad\n", tmp_path)
    assert status == 1
    assert "\nImportError: accumgrad needs TensorFlow 1.14 or newer" in output
    assert "pip install accumgrad[tensorflow]" in output


def test_import_with_an_older_tensorflow_says_what_is_needed(tmp_path):
    status, output = run_python(
        "import sys, types\n"
        "sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
        "sys.modules['tensorflow'].__version__ = '1.13.1'\n"
        "import accumgrad\n", tmp_path)
    assert status == 1
    assert ("\nImportError: accumgrad needs TensorFlow 1.14 or newer, "
            "got 1.13.1.") in output


def test_import_has_no_side_effect_on_tensorflow(tmp_path):
    status, output = run_python(
        "import tensorflow.compat.v1 as tf\n"
        "def state():\n"
        "    graph = tf.get_default_graph()\n"
        "    return (tf.executing_eagerly(), graph, graph.as_graph_def(),\n"
        "            graph.get_all_collection_keys(), graph.seed,\n"
        "            tf.resource_variables_enabled(),\n"
        # TensorFlow 1.14 has no such name.
        "            getattr(tf, 'control_flow_v2_enabled', int)(),\n"
        "            tf.logging.get_verbosity())\n"
        "before = state()\n"
        "import accumgrad\n"
        "assert state() == before, (before, state())\n", tmp_path)
    assert status == 0, output
