"""Fixtures that every test module shares."""

import pytest
import tensorflow.compat.v1 as tf

from doors import DOORS
from models import form  # noqa: F401, a fixture

# "v2" is what a program has that calls `disable_eager_execution()` alone.
BEHAVIORS = ["v1", "v2"] if tf.__version__ >= "2" else ["v1"]

tf.logging.set_verbosity(tf.logging.ERROR)


@pytest.fixture(params=BEHAVIORS)
def behavior(request):
    """TensorFlow 1's variables and control flow, and TensorFlow 2's."""
    if tf.__version__ < "2":
        pass  # which has no choice of control flow before 1.15
    elif request.param == "v1":
        tf.disable_resource_variables()
        tf.disable_control_flow_v2()
    else:
        tf.enable_resource_variables()
        tf.enable_control_flow_v2()
    return request.param


@pytest.fixture
def graph(behavior):
    """A fresh default graph, under each behavior."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        yield graph


@pytest.fixture(params=["reference", "resource"])
def use_resource(request):
    return request.param == "resource"


@pytest.fixture(params=sorted(DOORS))
def door(request):
    """A class of doors.py."""
    return DOORS[request.param]
