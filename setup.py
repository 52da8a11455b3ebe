"""Reads the version; all other metadata is in setup.cfg."""

import os
import re

import setuptools


def _read_version():
    # With a regular expression: importing the package needs TensorFlow.
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "accumgrad", "__init__.py"),
              encoding="utf-8") as file:
        return re.search(r'^__version__ = "(.+)"$', file.read(), re.M).group(1)


setuptools.setup(version=_read_version())
