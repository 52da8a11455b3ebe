"""A small model with a variable for each form of accumulator."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from accumgrad import accumulators

NUM_ROWS, WIDTH = 6, 3
DECAY = 0.01
FORMS = {"scale": "dense", "table": "rows", "matrix": "contraction"}


class Model(NamedTuple):
    """The model's tensors.

    Attributes:
        x: Placeholder, `[examples, WIDTH]`.
        ids: Placeholder, int32 `[examples]`.
        size: Scalar int32, the number of examples.
        loss: Scalar, the mean over the examples, and weight decay.
        variables: Dict of the trained variables by name.
    """
    x: tf.Tensor
    ids: tf.Tensor
    size: tf.Tensor
    loss: tf.Tensor
    variables: dict

    def feeds(self, sizes, seed=0):
        """Returns a feed dict for each number of examples."""
        random = np.random.RandomState(seed)
        return [{self.x: random.randn(size, WIDTH),
                 self.ids: random.randint(0, NUM_ROWS, size)}
                for size in sizes]

    def concatenated(self, feeds):
        """Returns the feed of one large batch."""
        return {tensor: np.concatenate([feed[tensor] for feed in feeds])
                for tensor in (self.x, self.ids)}


def build_model(use_resource=None, dtype=tf.float64):
    """Builds the model into the default graph."""
    random = np.random.RandomState(0)

    def variable(name, *shape):
        return tf.get_variable(
            name, shape, dtype, use_resource=use_resource,
            initializer=tf.constant_initializer(random.randn(*shape) / 2))
    variables = {"scale": variable("scale", WIDTH),
                 "table": variable("table", NUM_ROWS, WIDTH),
                 "matrix": variable("matrix", WIDTH, 2)}
    x = tf.placeholder(dtype, [None, WIDTH])
    ids = tf.placeholder(tf.int32, [None])
    hidden = x * variables["scale"] + tf.gather(variables["table"], ids)
    outputs = tf.tanh(tf.matmul(hidden, variables["matrix"]))
    loss = (tf.reduce_mean(tf.reduce_sum(tf.square(outputs), axis=1))
            + DECAY * tf.nn.l2_loss(variables["matrix"]))
    return Model(x, ids, tf.shape(x)[0], loss, variables)


def train_plainly(make_optimizer, cycles, form="auto", transform=None,
                  **options):
    """Trains without accumulation, on each cycle's feeds as one large batch.

    Args:
        make_optimizer: Function that returns the optimizer.
        cycles: List of pairs that `Model.feeds` takes: sizes, and a seed.
        form: `"dense"` makes the table's gradient dense.
        transform: Of the gradients, before they are applied.
        **options: Of `build_model`.

    Returns:
        For each cycle, the dict of all global variables afterwards.
    """
    results = []
    with tf.Graph().as_default(), tf.Session() as session:
        model = build_model(**options)
        optimizer = make_optimizer()
        pairs = optimizer.compute_gradients(model.loss)
        if form == "dense":
            pairs = [(tf.convert_to_tensor(gradient), variable)
                     for gradient, variable in pairs]
        if transform is not None:
            pairs = transform(pairs)
        train_op = optimizer.apply_gradients(pairs)
        session.run(tf.global_variables_initializer())
        for sizes, seed in cycles:
            session.run(train_op,
                        model.concatenated(model.feeds(sizes, seed)))
            results.append(read_variables(session))
    return results


def read_variables(session):
    """Returns the values of all global variables by name."""
    variables = tf.global_variables()
    return dict(zip([variable.op.name for variable in variables],
                    session.run(variables)))


def assert_close(found, expected, rtol=1e-12, atol=1e-14, but=()):
    """Compares dicts of variables, but for some that only one has."""
    assert set(found) - set(but) == set(expected) - set(but)
    for name in set(found) - set(but):
        np.testing.assert_allclose(found[name], expected[name], rtol, atol,
                                   err_msg=name)


def assert_same(found, expected):
    """Compares dicts of variables bit for bit, NaN with NaN."""
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


# How `small_forms` makes gradients be held.
HOLDINGS = ["dense", "stored", "folded"]


@pytest.fixture(params=HOLDINGS)
def form(request, monkeypatch):
    """The argument `accumulators`, with which small variables are deferred.

    As dense sums; as they come to the end of the cycle; and folded more than
    once.
    """
    monkeypatch.setattr(accumulators, "MIN_ELEMENTS_TO_DEFER", 0)
    monkeypatch.setattr(
        accumulators, "_max_rows",
        lambda product: 3 if request.param == "folded" else 1000)
    if request.param == "folded":
        monkeypatch.setattr(accumulators, "MIN_ELEMENTS_TO_FOLD", 0)
    return "dense" if request.param == "dense" else "auto"
