"""Random graphs, random cycles: "auto" against the dense sum, in float64."""

import hypothesis
import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

import accumgrad
from accumgrad import accumulators
from recipe import OPTIMIZERS

WIDTH = 4

LAYERS = {
    "matmul": lambda h, w: tf.tanh(tf.matmul(h, w)),
    "transposed": lambda h, w: tf.tanh(tf.matmul(h, w, transpose_b=True)),
    "from the left": lambda h, w: tf.tanh(
        tf.transpose(tf.matmul(w, h, transpose_b=True))),
    "twice": lambda h, w: tf.tanh(tf.matmul(tf.matmul(h, w), w)),
    "tensordot": lambda h, w: tf.reshape(tf.tanh(tf.tensordot(
        tf.reshape(h, [-1, 1, WIDTH]), w, [[2], [0]])), [-1, WIDTH]),
    "convolution": lambda h, w: tf.reshape(tf.tanh(tf.nn.conv2d(
        tf.reshape(h, [-1, 1, 1, WIDTH]),
        tf.reshape(w, [1, 1, WIDTH, WIDTH]), [1, 1, 1, 1], "VALID")),
        [-1, WIDTH]),
    "gather": lambda h, w: h + tf.gather(w, [0, 2, 0])[:1],
    "scale": lambda h, w: h * tf.reduce_sum(w, axis=0),
}

layer_lists = st.lists(
    st.tuples(st.sampled_from(sorted(LAYERS)),
              st.integers(0, 1)),  # which of two weights, so that they share
    min_size=1, max_size=4)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=25,
                     database=None)
@hypothesis.given(
    layers=layer_lists,
    cycles=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6),
                    min_size=1, max_size=2),
    reduction=st.sampled_from(["sum", "mean"]),
    decay=st.sampled_from([0.0, 0.1]),
    optimizer_name=st.sampled_from(["Adagrad", "GradientDescent"]),
    max_rows=st.integers(1, 8),
    seed=st.integers(0, 1000))
def test_auto_equals_dense(layers, cycles, reduction, decay, optimizer_name,
                           max_rows, seed):
    results = [
        run(accumulators_form, layers, cycles, reduction, decay,
            optimizer_name, max_rows, seed)
        for accumulators_form in ("dense", "auto")]
    # Float64 sums of at most some 100 terms of about one, in another order;
    # two updates with a tanh at each layer between them.
    for expected, found in zip(*results):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def run(form, layers, cycles, reduction, decay, optimizer_name, max_rows,
        seed):
    """Returns the weights after the cycles."""
    random = np.random.RandomState(seed)
    saved = (accumulators.MIN_ELEMENTS_TO_DEFER, accumulators._max_rows)
    accumulators.MIN_ELEMENTS_TO_DEFER = 0
    accumulators._max_rows = lambda product: max_rows
    try:
        with tf.Graph().as_default(), tf.Session() as session:
            x = tf.placeholder(tf.float64, [None, WIDTH])
            weights = [
                tf.get_variable(
                    f"w{i}", [WIDTH, WIDTH], tf.float64,
                    initializer=tf.constant_initializer(
                        random.randn(WIDTH, WIDTH)))
                for i in range(2)]
            hidden = x
            for layer, i in layers:
                hidden = LAYERS[layer](hidden, weights[i])
            loss = tf.reduce_sum(tf.square(hidden)) + decay * tf.add_n(
                [tf.nn.l2_loss(w) for w in weights])
            ops = accumgrad.build_accumulation_ops(
                loss, OPTIMIZERS[optimizer_name](), reduction=reduction,
                accumulators=form)
            session.run(tf.global_variables_initializer())
            for sizes in cycles:
                accumgrad.run_cycle(session, ops, [
                    {x: random.randn(size, WIDTH) / 4} for size in sizes])
            return session.run(weights)
    finally:
        (accumulators.MIN_ELEMENTS_TO_DEFER,
         accumulators._max_rows) = saved
