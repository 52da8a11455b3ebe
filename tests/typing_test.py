"""The package's type annotations; mypy checks them by itself."""

import ast
import glob
import os
import typing

import pytest

import accumgrad

PACKAGE = os.path.dirname(os.path.abspath(accumgrad.__file__))
MODULES = sorted(glob.glob(os.path.join(PACKAGE, "*.py")))


@pytest.mark.parametrize("path", MODULES, ids=os.path.basename)
def test_every_function_is_annotated(path):
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            arguments = function.args
            parameters = arguments.args + arguments.kwonlyargs + [
                extra for extra in (arguments.vararg, arguments.kwarg)
                if extra is not None]
            assert function.returns is not None, function.name
            assert not [parameter.arg for parameter in parameters
                        if parameter.annotation is None
                        and parameter.arg not in ("self", "cls")]


@pytest.mark.parametrize("name", accumgrad.__all__)
def test_annotations_name_what_is_there(name):
    public = getattr(accumgrad, name)
    functions = [public]
    if isinstance(public, type):
        functions += [member for member in vars(public).values()
                      if callable(member) and hasattr(
                          member, "__annotations__")]
    for function in functions:
        typing.get_type_hints(function)


def test_package_tells_type_checkers_that_it_is_typed():
    assert os.path.exists(os.path.join(PACKAGE, "py.typed"))
