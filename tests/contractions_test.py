"""Matrix products, multiplied once a cycle: exact, or not done at all."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from accumgrad import accumulators
from optimizers import GivenPairs
from recipe import OPTIMIZERS, build_recipe, initialize_recipe

# Micro-batches of a cycle, by their number of examples.
SIZES = [4, 1, 3, 4, 2, 4, 3, 4, 4]

# TensorFlow 2's two behaviors have one kind of variable each.
KINDS = [None] if tf.__version__ >= "2" else [False, True]

# Between sums of the same float64 terms in another order: some 100 terms of
# about one, with an eps of 2.2e-16 each, twice.
RTOL, ATOL = 1e-11, 1e-12


@pytest.fixture(autouse=True)
def defer_small_variables(monkeypatch):
    monkeypatch.setattr(accumulators, "MIN_ELEMENTS_TO_DEFER", 0)


def fold_beyond(monkeypatch, num_rows):
    """Makes accumulators store so many rows, whatever the variable's size."""
    monkeypatch.setattr(accumulators, "_max_rows", lambda product: num_rows)


@pytest.fixture(params=["stored", "folded"])
def folding(request, monkeypatch):
    """Factors kept to the end of a cycle, and multiplied several times."""
    fold_beyond(monkeypatch, 10 ** 6 if request.param == "stored" else 7)


def sgd():
    return tf.train.GradientDescentOptimizer(0.125)


def weights(*shape, name="w", dtype=tf.float64, use_resource=None):
    values = np.random.RandomState(len(name)).randn(*shape) / 4
    return tf.get_variable(name, shape, dtype, use_resource=use_resource,
                           initializer=tf.constant_initializer(values))


def examples(*shape, dtype=tf.float64):
    """Returns a placeholder that `make_feeds` will feed."""
    placeholder = tf.placeholder(dtype, shape)
    tf.add_to_collection("fed", placeholder)
    return placeholder


def make_feeds(sizes=None):
    """Returns a feed for each size, which takes the place of `None`."""
    feeds = []
    for seed, size in enumerate(SIZES if sizes is None else sizes):
        random = np.random.RandomState(seed)
        feeds.append({})
        for placeholder in tf.get_collection("fed"):
            shape = [size if length is None else length
                     for length in placeholder.shape.as_list()]
            feeds[-1][placeholder] = (
                random.randint(0, 6, shape) if placeholder.dtype.is_integer
                else random.randn(*shape))
    return feeds


def forms(ops):
    return {item.variable: item.form
            for item in accumgrad.describe_accumulators(ops)}


def reasons(ops):
    return {item.variable: item.reason
            for item in accumgrad.describe_accumulators(ops)}


def sum_in_numpy(make_optimizer, loss, feeds, num_cycles, reduction="sum"):
    """Returns the variables after cycles whose sums were made by NumPy."""
    optimizer = make_optimizer()
    pairs = [(tf.convert_to_tensor(gradient), variable) for gradient, variable
             in optimizer.compute_gradients(loss) if gradient is not None]
    gradients = [gradient for gradient, _ in pairs]
    fed = [tf.placeholder(gradient.dtype, variable.shape)
           for gradient, variable in pairs]
    step = make_optimizer().apply_gradients(
        [(total, variable) for total, (_, variable) in zip(fed, pairs)])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(num_cycles):
            by_micro_batch = [session.run(gradients, feed) for feed in feeds]
            totals = [np.sum(values, axis=0, dtype=np.float64)
                      for values in zip(*by_micro_batch)]
            if reduction == "mean":
                totals = [total / len(feeds) for total in totals]
            session.run(step, dict(zip(fed, totals)))
        return session.run(tf.trainable_variables())


def accumulate(ops, feeds, num_cycles):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(num_cycles):
            accumgrad.run_cycle(session, ops, feeds, len(feeds))
        return session.run(tf.trainable_variables())


def check(loss, feeds, make_optimizer=sgd, num_cycles=2, reduction="sum",
          rtol=RTOL, atol=ATOL):
    """Compares with NumPy's sums, and returns the ops."""
    ops = accumgrad.build_accumulation_ops(loss, make_optimizer(),
                                           reduction=reduction)
    expected = sum_in_numpy(make_optimizer, loss, feeds, num_cycles,
                            reduction)
    actual = accumulate(ops, feeds, num_cycles)
    for variable, old, new in zip(tf.trainable_variables(), expected, actual):
        assert np.isfinite(new).all()
        np.testing.assert_allclose(new, old, rtol, atol,
                                   err_msg=variable.op.name)
    return ops


# What is a sum of matrix products.  Each returns a loss, of variables "w...".

def one_layer(kind):
    return tf.tanh(tf.matmul(examples(None, 6), weights(
        6, 5, use_resource=kind)))


def static_batch(kind):
    return tf.tanh(tf.matmul(examples(3, 6), weights(
        6, 5, use_resource=kind)))


def batch_size_known_from_labels(kind):
    outputs = tf.matmul(examples(None, 6), weights(6, 5, use_resource=kind))
    return tf.squared_difference(outputs, examples(None, 5))


def layers_with_biases(kind):
    hidden = tf.nn.relu(tf.nn.xw_plus_b(
        examples(None, 6), weights(6, 5, name="w1", use_resource=kind),
        weights(5, name="b1", use_resource=kind)))
    return tf.nn.softmax(tf.nn.xw_plus_b(
        hidden, weights(5, 4, name="w22", use_resource=kind),
        weights(4, name="b2", use_resource=kind)))


def three_towers(kind):
    w = weights(6, 5, use_resource=kind)
    anchor, positive, negative = [
        tf.tanh(tf.matmul(examples(None, 6), w)) for _ in range(3)]
    return tf.nn.relu(
        1. + tf.reduce_sum(tf.square(anchor - positive), axis=1)
        - tf.reduce_sum(tf.square(anchor - negative), axis=1))


def unrolled_steps(kind):
    w, state = weights(6, 6, use_resource=kind), examples(None, 6)
    for _ in range(4):
        state = tf.tanh(tf.matmul(state, w))
    return state


def transpose_b(kind):
    return tf.tanh(tf.matmul(examples(None, 6), weights(
        5, 6, use_resource=kind), transpose_b=True))


def weights_on_the_left(kind):
    return tf.tanh(tf.matmul(weights(5, 6, use_resource=kind),
                             examples(6, None)))


def weights_on_the_left_transposed(kind):
    return tf.tanh(tf.matmul(
        weights(6, 5, use_resource=kind), examples(None, 6),
        transpose_a=True, transpose_b=True))


def products_of_every_orientation(kind):
    w = weights(6, 5, use_resource=kind)
    return [tf.tanh(tf.matmul(examples(None, 6), w)),
            tf.tanh(tf.matmul(examples(None, 5), w, transpose_b=True)),
            tf.tanh(tf.matmul(w, examples(5, None))),
            tf.tanh(tf.matmul(w, examples(None, 6), transpose_a=True,
                              transpose_b=True))]


def autoencoder(kind):
    w = weights(6, 5, use_resource=kind)
    x = examples(None, 6)
    return tf.squared_difference(
        x, tf.matmul(tf.tanh(tf.matmul(x, w)), w, transpose_b=True))


def tensordot(kind):
    return tf.tanh(tf.tensordot(examples(None, 3, 6), weights(
        6, 5, use_resource=kind), axes=1))


def reshaped_weights(kind):
    return tf.tanh(tf.matmul(examples(None, 6), tf.reshape(
        weights(2, 3, 5, use_resource=kind), [6, 5])))


def no_nonlinearity(kind):  # a factor is a fill of ones, of the fed size
    return tf.matmul(examples(None, 6), weights(6, 5, use_resource=kind))


def dropout_by_seed(kind):
    hidden = tf.nn.dropout(examples(None, 6), rate=0.5, seed=1)
    return tf.tanh(tf.matmul(hidden, weights(6, 5, use_resource=kind)))


def dropout_by_fed_mask(kind):
    hidden = tf.matmul(examples(None, 6), weights(
        6, 5, name="w1", use_resource=kind)) * examples(None, 5)
    return tf.tanh(tf.matmul(hidden, weights(
        5, 4, name="w22", use_resource=kind)))


def weight_decay(kind):
    return tf.add_n([tf.reduce_sum(one_layer(kind))] + [
        0.1 * tf.nn.l2_loss(w) for w in tf.trainable_variables()])


def decay_of_every_sort(kind):
    loss = tf.reduce_sum(one_layer(kind))
    [w] = tf.trainable_variables()
    gram = tf.matmul(w, w, transpose_a=True)
    return (loss + 0.1 * tf.nn.l2_loss(w) + 0.2 * tf.reduce_sum(tf.abs(w))
            + 0.1 * tf.reduce_sum(tf.square(gram - tf.eye(
                5, dtype=tf.float64))) + 0.1 * tf.norm(w))


def decay_in_collections(kind):
    with tf.variable_scope("", regularizer=lambda w: 0.1 * tf.nn.l2_loss(w)):
        tf.losses.add_loss(tf.reduce_sum(one_layer(kind)))
    return tf.losses.get_total_loss()


def product_with_another_variable(kind):
    loss = tf.reduce_sum(one_layer(kind))
    [w1] = tf.trainable_variables()
    w2 = weights(6, 5, name="w22", use_resource=kind)
    return loss + tf.reduce_sum(tf.tanh(tf.matmul(
        examples(None, 6), w2))) + 0.1 * tf.reduce_sum(w1 * w2)


def one_pixel_kernel(kind):
    return tf.tanh(tf.nn.conv2d(
        examples(None, 3, 2, 6), weights(1, 1, 6, 5, use_resource=kind),
        strides=[1, 1, 1, 1], padding="SAME"))


def one_pixel_kernel_on_one_pixel(kind):
    return tf.tanh(tf.nn.conv2d(
        examples(None, 1, 1, 6), weights(1, 1, 6, 5, use_resource=kind),
        strides=[1, 1, 1, 1], padding="VALID"))


def kernel_that_covers_the_input(kind):
    return tf.tanh(tf.nn.conv2d(
        examples(None, 3, 2, 4), weights(3, 2, 4, 5, use_resource=kind),
        strides=[1, 1, 1, 1], padding="VALID"))


def kernel_that_covers_the_input_with_strides(kind):
    return tf.tanh(tf.nn.conv2d(
        examples(None, 3, 2, 4), weights(3, 2, 4, 5, use_resource=kind),
        strides=[1, 2, 3, 1], padding="VALID"))


def transposed_convolution(kind):
    x = examples(None, 1, 1, 4)
    return tf.tanh(tf.nn.conv2d_transpose(
        x, weights(3, 2, 5, 4, use_resource=kind),
        tf.stack([tf.shape(x)[0], 3, 2, 5]), strides=[1, 1, 1, 1],
        padding="VALID"))


def one_dimensional_convolution(kind):
    return tf.tanh(tf.nn.conv1d(
        examples(None, 3, 4), weights(3, 4, 5, use_resource=kind),
        stride=1, padding="VALID"))


def decayed_convolution(kind):
    loss = tf.reduce_sum(kernel_that_covers_the_input(kind))
    return loss + 0.1 * tf.nn.l2_loss(tf.trainable_variables()[0])


def stopped_gradient(kind):
    w = weights(6, 5, use_resource=kind)
    x = examples(None, 6)
    return (tf.tanh(tf.matmul(x, w))
            + tf.stop_gradient(tf.tanh(tf.matmul(x, w)) * 2.))


def custom_gradient_of_the_outputs(kind):
    @tf.custom_gradient
    def reverse(x):
        return x, lambda gradient: -0.5 * gradient
    return tf.tanh(reverse(one_layer(kind)))


def overridden_gradient(kind):
    name = "Doubled{}".format(len(_REGISTERED))
    _REGISTERED.append(name)

    @tf.RegisterGradient(name)
    def double(op, gradient):
        return 2. * gradient * (1. - op.outputs[0])

    w = weights(6, 5, use_resource=kind)
    with tf.get_default_graph().gradient_override_map({"Tanh": name}):
        return tf.tanh(tf.matmul(examples(None, 6), w))


_REGISTERED = []


def branch_before_the_layer(kind):
    x = examples(None, 6)
    x = tf.cond(tf.reduce_sum(x) > 0., lambda: tf.sin(x), lambda: x * 2.)
    return tf.tanh(tf.matmul(x, weights(6, 5, use_resource=kind)))


def loop_after_the_layer(kind):
    return tf.while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, tf.sin(y)),
                         [0, one_layer(kind)])[1]


CONTRACTIONS = [
    one_layer, static_batch, batch_size_known_from_labels, layers_with_biases,
    three_towers, unrolled_steps, transpose_b, weights_on_the_left,
    weights_on_the_left_transposed, products_of_every_orientation,
    autoencoder, tensordot, reshaped_weights, no_nonlinearity,
    dropout_by_seed, dropout_by_fed_mask, weight_decay, decay_of_every_sort,
    decay_in_collections, product_with_another_variable, one_pixel_kernel,
    one_pixel_kernel_on_one_pixel, kernel_that_covers_the_input,
    kernel_that_covers_the_input_with_strides, transposed_convolution,
    one_dimensional_convolution, decayed_convolution, stopped_gradient,
    custom_gradient_of_the_outputs, overridden_gradient,
    branch_before_the_layer, loop_after_the_layer]


def total(loss):
    """Returns the scalar loss of what a form returned."""
    losses = loss if isinstance(loss, list) else [loss]
    return tf.add_n([tf.reduce_sum(part) for part in losses])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", CONTRACTIONS, ids=lambda form: form.__name__)
def test_products_are_deferred_and_exact(graph, monkeypatch, form, kind):
    # Folded, with some rows left over that are only stored.
    fold_beyond(monkeypatch, 7)
    ops = check(total(form(kind)), make_feeds())
    for name, accumulator_form in forms(ops).items():
        assert accumulator_form == ("contraction" if name.startswith("w")
                                    else "dense")


# What is not, and must be left alone.

def transposed_weights(kind):
    return tf.tanh(tf.matmul(examples(None, 6), tf.transpose(
        weights(5, 6, use_resource=kind))))


def tied_embedding(kind):
    table = weights(6, 5, use_resource=kind)
    hidden = tf.tanh(tf.gather(table, examples(None, dtype=tf.int32)))
    return tf.tanh(tf.matmul(hidden, table, transpose_b=True))


def part_of_the_weights(kind):
    return tf.tanh(tf.matmul(examples(None, 4), weights(
        6, 5, use_resource=kind)[1:5]))


def masked_weights(kind):
    return tf.tanh(tf.matmul(examples(None, 6), weights(
        6, 5, use_resource=kind) * examples(6, 5)))


def convolution(padding="VALID", strides=1, size=2, dilations=1):
    def build(kind):
        return tf.tanh(tf.nn.conv2d(
            examples(None, 3, 3, 4),
            weights(size, size, 4, 5, use_resource=kind),
            strides=[1, strides, strides, 1], padding=padding,
            dilations=[1, dilations, dilations, 1]))
    return build


def difference_of_products(kind):
    x = examples(None, 6)
    w = weights(6, 5, use_resource=kind)

    @tf.custom_gradient
    def layer(x, w):
        def gradient(dy):
            return (tf.matmul(dy, w, transpose_b=True),
                    tf.matmul(x, dy, transpose_a=True)
                    - tf.matmul(x * x, dy, transpose_a=True))
        return tf.matmul(x, w), gradient
    return tf.tanh(layer(x, tf.identity(w)))


def products_of_two_shapes(kind):
    w = weights(4, 6, use_resource=kind)
    return [tf.tanh(tf.matmul(examples(None, 4), w)),
            tf.tanh(tf.matmul(examples(None, 3), tf.reshape(w, [3, 8])))]


def loop(kind):
    w = weights(6, 6, use_resource=kind)
    return tf.while_loop(
        lambda n, y: n < 3, lambda n, y: (n + 1, tf.tanh(tf.matmul(y, w))),
        [0, examples(None, 6)])[1]


def loop_and_layer(kind):
    w = weights(6, 6, use_resource=kind)
    return tf.tanh(tf.matmul(tf.while_loop(
        lambda n, y: n < 3, lambda n, y: (n + 1, tf.tanh(tf.matmul(y, w))),
        [0, examples(None, 6)])[1], w))


def branch(kind):
    w, x = weights(6, 5, use_resource=kind), examples(None, 6)
    return tf.cond(tf.reduce_sum(x) > 0.,
                   lambda: tf.tanh(tf.matmul(x, w)),
                   lambda: 2. * tf.tanh(tf.matmul(x * x, w)))


def branch_and_layer(kind):
    w, x = weights(6, 5, use_resource=kind), examples(None, 6)
    return tf.sin(tf.matmul(x, w)) + tf.cond(
        tf.reduce_sum(x) > 0., lambda: tf.tanh(tf.matmul(x, w)),
        lambda: tf.zeros_like(x[:, :5]))


def decay_in_a_branch(kind):
    loss = tf.reduce_sum(one_layer(kind))
    [w] = tf.trainable_variables()
    return loss + tf.cond(loss > 0., lambda: tf.nn.l2_loss(w),
                          lambda: tf.zeros([], tf.float64))


def recurrent_network(kind):
    try:
        cell = tf.nn.rnn_cell.BasicRNNCell(4)
    except AttributeError as error:
        pytest.skip(str(error))
    outputs, _ = tf.nn.dynamic_rnn(
        cell, examples(None, 3, 4), dtype=tf.float64)
    return outputs


def nothing_but_decay(kind):
    return tf.nn.l2_loss(weights(6, 5, use_resource=kind))


def gradient_that_is_a_constant(kind):
    return weights(6, 5, use_resource=kind) * 3.


# The gradient of TensorFlow 1.15's `tf.cond` has no static shape, if the
# variable is a resource.
NO_PRODUCT = " is no matrix product over the batch"
NO_PRODUCT_OR_SHAPE = f"({NO_PRODUCT}|its static shape is unknown)"
DENSE = {
    "transposed_weights": (transposed_weights, "Transpose" + NO_PRODUCT),
    # TensorFlow 1.14 makes IndexedSlices of the dense part too.
    "tied_embedding": (tied_embedding,
                       f"({NO_PRODUCT}|it is IndexedSlices)"),
    "part_of_the_weights": (part_of_the_weights, NO_PRODUCT),
    "masked_weights": (masked_weights, "(Mul|Sum)" + NO_PRODUCT),
    "convolution_SAME": (convolution("SAME", size=3), "Conv2DBackpropFilter"),
    "convolution_small_kernel": (convolution(), "Conv2DBackpropFilter"),
    "convolution_strides": (convolution(strides=2, size=1),
                            "Conv2DBackpropFilter"),
    "difference_of_products": (difference_of_products, "Sub" + NO_PRODUCT),
    "products_of_two_shapes": (products_of_two_shapes,
                               "it sums matrix products of different sizes"),
    "loop": (loop, NO_PRODUCT),
    "loop_and_layer": (loop_and_layer, NO_PRODUCT),
    "branch": (branch, NO_PRODUCT_OR_SHAPE),
    "branch_and_layer": (branch_and_layer, NO_PRODUCT),
    "decay_in_a_branch": (decay_in_a_branch, NO_PRODUCT),
    "recurrent_network": (recurrent_network, NO_PRODUCT),
    "nothing_but_decay": (nothing_but_decay,
                          "it is the same in every micro-batch"),
    "gradient_that_is_a_constant": (gradient_that_is_a_constant,
                                    "it is the same in every micro-batch"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(DENSE))
def test_all_else_is_not_deferred_and_exact(graph, monkeypatch, name, kind):
    if tf.__version__.startswith("1.14") and kind and "branch" in name:
        pytest.skip("tf.gradients fails there: of the branch not taken, it "
                    "makes float32 zeros for a float64 resource variable")
    fold_beyond(monkeypatch, 10 ** 6)
    form, reason = DENSE[name]
    ops = check(total(form(kind)), make_feeds([2, 3, 1]))
    described = accumgrad.describe_accumulators(ops)[0]
    assert described.form != "contraction"
    assert re.search(reason, described.reason)


@pytest.mark.parametrize("form", ["groups", "dilations"])
def test_convolution_in_groups_or_dilated_is_dense(graph, monkeypatch, form):
    # Built alone: not every TensorFlow computes these on a CPU.
    fold_beyond(monkeypatch, 10 ** 6)
    if form == "groups":
        loss = tf.nn.conv2d(examples(None, 1, 1, 8), weights(1, 1, 4, 6),
                            strides=[1, 1, 1, 1], padding="VALID")
    else:
        loss = tf.nn.conv2d(examples(None, 3, 3, 4), weights(2, 2, 4, 6),
                            strides=[1, 1, 1, 1], padding="VALID",
                            dilations=[1, 2, 2, 1])
    ops = accumgrad.build_accumulation_ops(tf.reduce_sum(loss), sgd())
    assert reasons(ops) == {"w": "Conv2DBackpropFilter" + NO_PRODUCT}


# Other people's layers.

def keras_layers():
    if tf.__version__ < "2.16":
        return tf.keras.layers
    return pytest.importorskip("tf_keras").layers


def keras_dense(x):
    return keras_layers().Dense(5, "tanh")(x)


def keras_dense_on_sequences(x):
    return keras_layers().Dense(5, "tanh")(tf.reshape(x, [-1, 2, 3]))


def keras_convolution(x):
    return keras_layers().Conv2D(5, 1, activation="tanh")(
        tf.reshape(x, [-1, 2, 1, 3]))


def tf_layers_dense(x):
    try:
        return tf.layers.dense(x, 5, tf.tanh)
    except AttributeError as error:  # TensorFlow 2.16 and later
        pytest.skip(str(error))


def tf_layers_dense_on_sequences(x):
    return tf_layers_dense(tf.reshape(x, [-1, 2, 3]))


def slim_fully_connected(x):
    slim = pytest.importorskip("tf_slim")
    return slim.fully_connected(
        x, 5, tf.tanh, weights_regularizer=slim.l2_regularizer(0.1))


def slim_convolution(x):
    slim = pytest.importorskip("tf_slim")
    return slim.conv2d(
        tf.reshape(x, [-1, 2, 1, 3]), 5, [2, 1], padding="VALID",
        activation_fn=tf.tanh, weights_regularizer=slim.l2_regularizer(0.1))


@pytest.mark.parametrize("layer", [
    keras_dense, keras_dense_on_sequences, keras_convolution, tf_layers_dense,
    tf_layers_dense_on_sequences, slim_fully_connected, slim_convolution],
    ids=lambda layer: layer.__name__)
def test_layers_of_others(graph, folding, layer):
    loss = tf.reduce_sum(tf.cast(
        layer(tf.cast(examples(None, 6), tf.float32)), tf.float64))
    loss += tf.cast(tf.losses.get_regularization_loss(), tf.float64)
    kernel = tf.trainable_variables()[0]
    # Initial values are random, and both sides must have the same.
    init = tf.group(*[
        variable.assign(0.1 + tf.cast(tf.reshape(tf.range(
            variable.shape.num_elements()), variable.shape), tf.float32) / 50)
        for variable in tf.trainable_variables()])
    gradient = tf.gradients(loss, kernel)[0]
    feeds = make_feeds()
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(init)
        before = session.run(kernel)
        expected = sum(session.run(gradient, feed).astype(np.float64)
                       for feed in feeds)
        accumgrad.run_cycle(session, ops, feeds)
        moved = before - session.run(kernel)
    # float32: about 30 terms, of about one, with an eps of 6e-8 each.
    np.testing.assert_allclose(moved, 0.125 * expected, 1e-5, 1e-5)
    assert forms(ops)[kernel.op.name] == "contraction"


# Against NumPy alone.

@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("num_micro_batches, max_rows", [
    (1, 1000), (2, 1000), (7, 10), (128, 1000), (128, 1), (1000, 100)])
def test_cycle_equals_closed_form(graph, monkeypatch, num_micro_batches,
                                  max_rows, reduction):
    # d/dw of |x w - y|^2 / 2 + 0.05 |w|^2 is x^T (x w - y) + 0.1 w.
    fold_beyond(monkeypatch, max_rows)
    x, y = examples(None, 6), examples(None, 5)
    w = weights(6, 5)
    loss = (0.5 * tf.reduce_sum(tf.squared_difference(tf.matmul(x, w), y))
            + 0.1 * tf.nn.l2_loss(w))
    ops = accumgrad.build_accumulation_ops(loss, sgd(), reduction=reduction)
    assert reasons(ops) == {"w": "MatMul + constant"}
    feeds = make_feeds([(n % 3) + 1 for n in range(num_micro_batches)])
    rows = np.concatenate([feed[x] for feed in feeds])
    targets = np.concatenate([feed[y] for feed in feeds])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        accumgrad.run_cycle(session, ops, feeds, num_micro_batches)
        moved = before - session.run(w)
    gradient = (rows.T.dot(rows.dot(before) - targets)
                + num_micro_batches * 0.1 * before)
    if reduction == "mean":
        gradient /= num_micro_batches
    # The rate 0.1 of the decay is rounded to float64 on both sides.
    np.testing.assert_allclose(moved, 0.125 * gradient, 1e-11, 1e-11)


def large_batches(optimizer_name, reduce, batches):
    """Returns all variables after each `minimize` of a whole batch."""
    values = []
    with tf.Graph().as_default(), tf.Session() as session:
        loss = two_layers(reduce)
        train_op = OPTIMIZERS[optimizer_name]().minimize(loss)
        fed = tf.get_collection("fed")
        session.run(tf.global_variables_initializer())
        for batch in batches:
            session.run(train_op, dict(zip(fed, batch)))
            values.append(session.run(tf.global_variables()))
    return values


def two_layers(reduce):
    x, y = examples(None, 6), examples(None, 4)
    hidden = tf.tanh(tf.matmul(x, weights(6, 5, name="w1")))
    outputs = tf.matmul(hidden, weights(5, 4, name="w22"))
    return reduce(tf.reduce_sum(tf.squared_difference(outputs, y), axis=1))


@pytest.mark.parametrize("optimizer_name", ["Adam", "Momentum", "Ftrl"])
@pytest.mark.parametrize("reduction, reduce", [
    ("sum", tf.reduce_sum), ("mean", tf.reduce_mean)], ids=["sum", "mean"])
def test_cycles_equal_large_batches(graph, monkeypatch, optimizer_name,
                                    reduction, reduce):
    fold_beyond(monkeypatch, 5)
    sizes = [2] * 4
    loss = two_layers(reduce)
    ops = accumgrad.build_accumulation_ops(
        loss, OPTIMIZERS[optimizer_name](), reduction=reduction)
    assert forms(ops) == {"w1": "contraction", "w22": "contraction"}
    fed = tf.get_collection("fed")
    cycles = [make_feeds(sizes), make_feeds(sizes[:1]), make_feeds(sizes)]
    expected = large_batches(optimizer_name, reduce, [
        [np.concatenate([feed[placeholder] for feed in feeds])
         for placeholder in fed] for feeds in cycles])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for feeds, whole in zip(cycles, expected):
            accumgrad.run_cycle(session, ops, feeds)
            for old, new in zip(whole, session.run(tf.global_variables())):
                # Adam's quotients magnify what is near zero.
                np.testing.assert_allclose(new, old, 1e-9, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer_name", ["Adam", "GradientDescent"])
def test_decayed_layers_equal_the_recipe(graph, monkeypatch,
                                         optimizer_name, kind):
    fold_beyond(monkeypatch, 9)
    loss = total(layers_with_biases(kind))
    loss += 0.1 * tf.add_n([tf.nn.l2_loss(variable)
                            for variable in tf.trainable_variables()])
    feeds = make_feeds()
    ops = accumgrad.build_accumulation_ops(loss,
                                           OPTIMIZERS[optimizer_name]())
    zero_ops, accum_ops, train_op = build_recipe(
        loss, OPTIMIZERS[optimizer_name]())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        initialize_recipe(session)
        for _ in range(3):
            session.run(zero_ops)
            for feed in feeds:
                session.run(accum_ops, feed)
            session.run(train_op)
        expected = session.run(tf.trainable_variables())
    for old, new in zip(expected, accumulate(ops, feeds, 3)):
        np.testing.assert_allclose(new, old, 1e-9, 1e-9)


# Constant terms: counted as often as the recipe counts them, or not at all.

def decayed_layer(coefficient, kind=None):
    """Returns w, and a loss whose gradient is coefficient w if x is 0."""
    x = examples(None, 6)
    w = weights(6, 5, use_resource=kind)
    return w, (tf.reduce_sum(tf.matmul(x, w))
               + coefficient * tf.nn.l2_loss(w))


def run_on_zeros(ops, w, num_micro_batches=3, extra_feeds=None):
    """Returns w before and after a cycle that feeds x as zeros."""
    [x] = tf.get_collection("fed")
    feeds = []
    for extra in extra_feeds or [{}] * num_micro_batches:
        feeds.append(dict(extra))
        feeds[-1][x] = np.zeros([2, 6])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        accumgrad.run_cycle(session, ops, feeds, len(feeds))
        return before, session.run(w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction, times", [("sum", 3), ("mean", 1)])
def test_decay_counts_as_in_the_recipe(graph, folding, reduction, times,
                                       kind):
    w, loss = decayed_layer(0.25, kind)
    ops = accumgrad.build_accumulation_ops(
        loss, tf.train.GradientDescentOptimizer(0.5), reduction=reduction)
    assert reasons(ops) == {"w": "MatMul + constant"}
    before, after = run_on_zeros(ops, w)
    np.testing.assert_allclose(after, (1 - 0.5 * 0.25 * times) * before,
                               1e-14)


def test_decay_of_a_variable_that_is_not_trained(graph, folding):
    w, loss = decayed_layer(0.25)
    other = weights(6, 5, name="other")
    ops = accumgrad.build_accumulation_ops(
        loss + tf.nn.l2_loss(other), tf.train.GradientDescentOptimizer(0.5),
        [w])
    assert reasons(ops) == {"w": "MatMul + constant"}
    before, after = run_on_zeros(ops, w)
    np.testing.assert_allclose(after, (1 - 0.5 * 0.25 * 3) * before, 1e-14)


def test_term_that_reads_a_variable_not_trained_is_no_constant(
        graph, monkeypatch):
    # d/dw of sum(w other) is `other`, which the caller moves in the cycle.
    fold_beyond(monkeypatch, 10 ** 6)
    w, loss = decayed_layer(0.)
    other = weights(6, 5, name="other")
    double = other.assign(2. * other)
    ops = accumgrad.build_accumulation_ops(
        loss + tf.reduce_sum(w * other),
        tf.train.GradientDescentOptimizer(1.), [w])
    assert forms(ops) == {"w": "dense"}
    feed = {tf.get_collection("fed")[0]: np.zeros([2, 6])}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before, start = session.run([w, other])
        session.run(ops.zero_ops)
        for _ in range(3):
            session.run(ops.accum_ops, feed)
            session.run(double)
        session.run(ops.train_op)
        np.testing.assert_allclose(session.run(w), before - 7 * start,
                                   1e-12, 1e-14)


def counter_in_the_loss():
    count = tf.get_variable("count", [], tf.float64, trainable=False,
                            initializer=tf.zeros_initializer())
    with tf.control_dependencies([tf.assign_add(count, 1.)]):
        return count.read_value(), None, 1 + 2 + 3


def fed_placeholder():
    fed = tf.placeholder(tf.float64, [])
    return fed, [{fed: 1.}, {fed: 2.}, {fed: 4.}], 7


def fed_placeholder_with_default():
    fed = tf.placeholder_with_default(tf.ones([], tf.float64), [])
    return fed, [{fed: 5.}, {}, {fed: 4.}], 10


def seeded_random():
    with tf.Session() as session:
        number = tf.random_uniform([], dtype=tf.float64, seed=3)
        return number, None, sum(session.run(number) for _ in range(3))


def data_set():
    numbers = tf.data.Dataset.from_tensor_slices(
        np.array([1., 2., 4.])).repeat()
    return (tf.data.make_one_shot_iterator(numbers).get_next(), None, 7)


def python_function():
    count = []

    def step():
        count.append(1)
        return np.float64(len(count))
    number = tf.py_func(step, [], tf.float64)
    number.set_shape([])
    return number, None, 1 + 2 + 3


VARYING = [counter_in_the_loss, fed_placeholder, fed_placeholder_with_default,
           seeded_random, data_set, python_function]


@pytest.mark.parametrize("form", VARYING, ids=lambda form: form.__name__)
def test_term_that_varies_is_no_constant(graph, monkeypatch, form):
    fold_beyond(monkeypatch, 10 ** 6)
    coefficient, feeds, expected = form()
    w, loss = decayed_layer(coefficient)
    ops = accumgrad.build_accumulation_ops(
        loss, tf.train.GradientDescentOptimizer(0.125))
    assert reasons(ops) == {"w": "Mul" + NO_PRODUCT}
    before, after = run_on_zeros(ops, w, extra_feeds=feeds)
    np.testing.assert_allclose(after, (1 - 0.125 * expected) * before, 1e-12)


def test_term_that_depends_on_an_assignment_is_no_constant(graph,
                                                           monkeypatch):
    # An op that is pure but for its control dependency.
    fold_beyond(monkeypatch, 10 ** 6)
    steps = tf.get_variable("steps", [], tf.float64, trainable=False,
                            initializer=tf.zeros_initializer())
    with tf.control_dependencies([tf.assign_add(steps, 1.)]):
        coefficient = tf.constant(0.5, tf.float64)
    w, loss = decayed_layer(coefficient)
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert forms(ops) == {"w": "dense"}
    [x] = tf.get_collection("fed")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, [{x: np.zeros([2, 6])}] * 4)
        assert session.run(steps) == 4


def halve_after(w, tensor):
    with tf.control_dependencies([tensor]):
        return w.assign(0.5 * w.read_value())


@pytest.mark.parametrize("place", ["caller", "loss", "factor"])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_variable_that_is_assigned_to_is_no_constant(
        graph, monkeypatch, place, kind):
    # Each micro-batch halves w, after it took w as the gradient's decay.
    fold_beyond(monkeypatch, 10 ** 6)
    x = examples(None, 6)
    w = weights(6, 5, use_resource=kind)
    decay = 1. * w.read_value()
    halve = halve_after(w, decay)
    loss = tf.reduce_sum(x)
    outputs = tf.ones_like(x[:, :5])
    if place == "factor":
        with tf.control_dependencies([halve]):
            outputs = tf.identity(outputs)
    elif place == "loss":
        with tf.control_dependencies([halve]):
            loss = tf.identity(loss)
    gradient = tf.matmul(x, outputs, transpose_a=True) + decay
    with tf.control_dependencies([halve] if place == "caller" else []):
        ops = accumgrad.build_accumulation_ops(
            loss, GivenPairs([(gradient, w)]))
    assert forms(ops) == {"w": "dense"}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        session.run(ops.zero_ops)
        for _ in range(3):
            session.run([ops.accum_ops, loss], {x: np.zeros([2, 6])})
        session.run(ops.train_op)
        np.testing.assert_allclose(
            session.run(w), before / 8 - (1 + 0.5 + 0.25) * before, 1e-12,
            1e-15)


def test_update_ops_leave_decay_a_constant(graph, folding):
    # What batch normalisation's moving averages are.
    average = tf.get_variable("average", [6], tf.float64, trainable=False,
                              initializer=tf.zeros_initializer())
    w, loss = decayed_layer(0.25)
    [x] = tf.get_collection("fed")
    with tf.control_dependencies([
            average.assign(average + tf.reduce_mean(x, axis=0))]):
        ops = accumgrad.build_accumulation_ops(
            loss, tf.train.GradientDescentOptimizer(0.5))
    assert reasons(ops) == {"w": "MatMul + constant"}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        accumgrad.run_cycle(session, ops, [{x: np.ones([2, 6])}] * 3)
        np.testing.assert_array_equal(session.run(average), np.full(6, 3.))
        np.testing.assert_allclose(
            session.run(w), (1 - 0.5 * 0.25 * 3) * before - 0.5 * 6,
            1e-12)


class DecayFirst(tf.train.GradientDescentOptimizer):
    """Decays a variable before it takes its gradient, as AdamW does."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads_and_vars = list(grads_and_vars)
        with tf.control_dependencies([
                tf.assign(variable, 0.5 * variable)
                for _, variable in grads_and_vars]):
            return super().apply_gradients(grads_and_vars, global_step, name)


MOVING = dict(OPTIMIZERS, DecayFirst=lambda: DecayFirst(0.125))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer_name", [
    "GradientDescent", "Momentum", "Adam", "DecayFirst"])
def test_constants_are_read_before_any_variable_moves(
        graph, monkeypatch, optimizer_name, kind):
    # A ring of variables, each of whose gradient is the next one.
    fold_beyond(monkeypatch, 10 ** 6)
    num_variables, num_cycles = 6, 100
    ring = [weights(24, 20, name="w" * (n + 1), use_resource=kind)
            for n in range(num_variables)]
    outputs = tf.matmul(examples(None, 24), tf.add_n(ring))
    loss = 1e-3 * tf.reduce_sum(outputs) + 0.05 * tf.add_n([
        tf.reduce_sum(w * after)
        for w, after in zip(ring, ring[1:] + ring[:1])])
    make_optimizer = MOVING[optimizer_name]
    ops = accumgrad.build_accumulation_ops(loss, make_optimizer())
    assert set(reasons(ops).values()) == {"MatMul + constant + constant"}
    zero_ops, accum_ops, train_op = build_recipe(loss, make_optimizer())
    [feed] = make_feeds([2])
    config = tf.ConfigProto(inter_op_parallelism_threads=16)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        initialize_recipe(session)
        for _ in range(num_cycles):
            session.run(zero_ops)
            session.run(accum_ops, feed)
            session.run(train_op)
        expected = session.run(ring)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(num_cycles):
            accumgrad.run_cycle(session, ops, [feed])
        # A hundred updates of float64, of which the worst are Adam's.
        for old, new in zip(expected, session.run(ring)):
            np.testing.assert_allclose(new, old, 1e-8, 1e-8)


class RecordingSyncReplicas(tf.train.SyncReplicasOptimizer):
    """Keeps the gradients that it would push to the chief."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self.given = list(grads_and_vars)
        return tf.no_op()


def upstream(tensor):
    seen, stack = set(), [tensor.op]
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack.extend([source.op for source in op.inputs]
                         + list(op.control_inputs))
    return seen


def test_constants_are_read_before_any_gradient_is_pushed(graph, monkeypatch):
    # The chief moves a variable once it has that variable's gradients.
    fold_beyond(monkeypatch, 10 ** 6)
    ring = [weights(6, 5, name="w" * (n + 1)) for n in range(3)]
    loss = tf.reduce_sum(tf.matmul(examples(None, 6), tf.add_n(ring)))
    loss += tf.add_n([tf.nn.l2_loss(w) for w in ring])
    optimizer = RecordingSyncReplicas(sgd(), replicas_to_aggregate=1)
    ops = accumgrad.build_accumulation_ops(loss, optimizer)
    assert set(reasons(ops).values()) == {"MatMul + constant"}
    for gradient, _ in optimizer.given:
        assert {w.op for w in ring} <= upstream(gradient)


# What a user tied to a gradient still happens.

def assign_when(gradient, x):
    counted = tf.get_variable("counted", [], trainable=False,
                              initializer=tf.zeros_initializer())
    return tf.assign_add(counted, 1.)


def assign_behind_a_pure_op(gradient, x):
    with tf.control_dependencies([assign_when(gradient, x)]):
        return tf.identity(x)


def check_of_the_gradient(gradient, x):
    return tf.check_numerics(gradient, "not finite")


def assertion(gradient, x):
    return tf.Assert(tf.reduce_all(tf.is_finite(gradient)), ["not finite"])


def summary(gradient, x):
    return tf.py_func(lambda value: _CALLS.append(value), [gradient], [])


_CALLS = []


@pytest.mark.parametrize("effect", [
    assign_when, assign_behind_a_pure_op, check_of_the_gradient, assertion,
    summary], ids=lambda effect: effect.__name__)
def test_effects_that_hang_on_a_gradient_still_happen(graph, monkeypatch,
                                                      effect):
    fold_beyond(monkeypatch, 10 ** 6)
    x = examples(None, 6)
    w = weights(6, 5)
    gradient = tf.gradients(tf.matmul(x, w), w)[0]
    with tf.control_dependencies([effect(gradient, x)]):
        gradient = tf.identity(gradient)
    ops = accumgrad.build_accumulation_ops(tf.reduce_sum(x),
                                           GivenPairs([(gradient, w)]))
    assert re.search(r"^\w+ must run with it in every micro-batch$",
                     reasons(ops)["w"])
    del _CALLS[:]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        feeds = make_feeds([2, 1, 2])
        accumgrad.run_cycle(session, ops, feeds)
        if effect in (assign_when, assign_behind_a_pure_op):
            assert session.run(tf.global_variables("counted")) == [3]
        elif effect is summary:
            assert len(_CALLS) == 3
        else:
            with pytest.raises(tf.errors.InvalidArgumentError,
                               match="not finite"):
                session.run(ops.accum_ops, {x: np.full([2, 6], np.inf)})


def test_effects_on_the_way_to_a_factor_are_no_obstacle(graph, folding):
    # They run with the factor: dropout, an input pipeline, a counter.
    x = examples(None, 6)
    counted = tf.get_variable("counted", [], trainable=False,
                              initializer=tf.zeros_initializer())
    with tf.control_dependencies([
            tf.assign_add(counted, 1.),
            tf.Assert(tf.reduce_all(tf.is_finite(x)), [x])]):
        hidden = tf.nn.dropout(tf.identity(x), rate=0.5, seed=1)
    w = weights(6, 5)
    outputs = tf.tanh(tf.matmul(hidden, w))
    ops = check(tf.reduce_sum(outputs), make_feeds())
    assert forms(ops) == {"w": "contraction"}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, make_feeds())
        assert session.run(counted) == len(SIZES)


class Rewriting(tf.train.GradientDescentOptimizer):
    """Hands on what it makes of each gradient."""

    def __init__(self, rewrite):
        super().__init__(0.125)
        self._rewrite = rewrite

    def compute_gradients(self, loss, var_list=None, **options):
        return [(self._rewrite(gradient), variable) for gradient, variable
                in super().compute_gradients(loss, var_list, **options)]


@pytest.mark.parametrize("name, rewrite, form", [
    ("clipped by value", lambda g: tf.clip_by_value(g, -.1, .1), "dense"),
    ("clipped by norm", lambda g: tf.clip_by_norm(g, .5), "dense"),
    ("scaled", lambda g: 0.5 * g, "dense"),
    ("noisy", lambda g: g + tf.random_normal(
        [6, 5], dtype=tf.float64, seed=1), "dense"),
    ("decayed", lambda g: g + 0.1 * tf.trainable_variables()[0],
     "contraction"),
    ("doubled", lambda g: g + g, "contraction"),
    ("stopped", tf.stop_gradient, "dense"),
    ("reshaped", lambda g: tf.reshape(tf.reshape(g, [30]), [6, 5]),
     "contraction"),
    ("turned", lambda g: tf.reshape(tf.transpose(g), [6, 5]), "dense"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_rewritten_gradients(graph, folding, name, rewrite, form):
    ops = check(total(one_layer(None)), make_feeds(),
                lambda: Rewriting(rewrite))
    assert forms(ops) == {"w": form}


def test_gradient_of_another_shape_is_refused_as_ever(graph, monkeypatch):
    # Of as many elements: reshaped, it would be silently wrong.
    fold_beyond(monkeypatch, 10 ** 6)
    x, w = examples(None, 6), weights(6, 5)
    gradient = tf.matmul(tf.matmul(x, w), x, transpose_a=True)
    with pytest.raises(ValueError, match="5 and 6|6 and 5"):
        accumgrad.build_accumulation_ops(tf.reduce_sum(x),
                                         GivenPairs([(gradient, w)]))


def test_shared_terms_that_are_exponentially_many(graph, monkeypatch):
    fold_beyond(monkeypatch, 10 ** 6)
    x, w = examples(None, 6), weights(6, 5)
    gradient = tf.matmul(x, tf.matmul(x, w), transpose_a=True)
    for _ in range(100):
        gradient = gradient + gradient
    ops = accumgrad.build_accumulation_ops(tf.reduce_sum(x),
                                           GivenPairs([(gradient, w)]))
    assert reasons(ops) == {"w": "it sums more than 1000 terms"}


def test_sum_of_many_terms(graph, monkeypatch):
    # Deeper than Python's stack.
    fold_beyond(monkeypatch, 10 ** 6)
    x, w = examples(None, 6), weights(6, 5)
    term = tf.matmul(x, tf.ones_like(x[:, :5]), transpose_a=True)
    gradient = term
    for _ in range(199):
        for _ in range(4):
            gradient = tf.identity(gradient)
        gradient = gradient + term
    ops = accumgrad.build_accumulation_ops(tf.reduce_sum(x),
                                           GivenPairs([(gradient, w)]))
    assert forms(ops) == {"w": "contraction"}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        accumgrad.run_cycle(session, ops, [{x: np.ones([1, 6])}] * 2)
        np.testing.assert_allclose(before - session.run(w),
                                   np.full([6, 5], 400.))


# What is stored is stored.

def aligned(shape, dtype):
    """Returns zeros that TensorFlow takes as a feed without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("orientation", ["as rows", "as columns"])
def test_refilled_buffers_do_not_change_what_is_stored(graph, monkeypatch,
                                                       orientation):
    fold_beyond(monkeypatch, 10 ** 6)
    w = weights(16, 8)
    ids = tf.placeholder(tf.int32, [4])
    table = tf.get_variable("table", [64, 8], tf.float64,
                            initializer=tf.zeros_initializer())
    if orientation == "as rows":
        left, right = [tf.placeholder(tf.float64, shape)
                       for shape in ([4, 16], [4, 8])]
        gradient = tf.matmul(left, right, transpose_a=True)
    else:
        left, right = [tf.placeholder(tf.float64, shape)
                       for shape in ([16, 4], [8, 4])]
        gradient = tf.matmul(left, right, transpose_b=True)
    rows = tf.IndexedSlices(tf.ones([4, 8], tf.float64), ids,
                            tf.constant([64, 8]))
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(left), GivenPairs([(gradient, w), (rows, table)]))
    assert forms(ops) == {"w": "contraction", "table": "rows"}
    fed = {left: aligned(left.shape.as_list(), np.float64),
           right: aligned(right.shape.as_list(), np.float64),
           ids: aligned([4], np.int32)}
    expected, counts = np.zeros([16, 8]), np.zeros(64)
    random = np.random.RandomState(0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        session.run(ops.zero_ops)
        for n in range(4):
            for placeholder in (left, right):
                fed[placeholder][:] = random.randn(*fed[placeholder].shape)
            fed[ids][:] = np.arange(4) + 4 * n
            counts[fed[ids]] += 1
            expected += (fed[left].T.dot(fed[right])
                         if orientation == "as rows"
                         else fed[left].dot(fed[right].T))
            session.run(ops.accum_ops, fed)
        for buffer in fed.values():
            buffer[:] = 0
        session.run(ops.train_op)
        np.testing.assert_allclose(before - session.run(w), expected, 1e-11,
                                   1e-12)
        np.testing.assert_array_equal(-session.run(table)[:, 0], counts)


def test_fed_factor(graph, folding):
    # Any tensor can be fed: here, what the next layer makes of its input.
    w = weights(6, 5)
    x, targets = examples(None, 6), examples(None, 5)
    hidden = tf.sin(x)
    outputs = tf.matmul(hidden, w)
    loss = tf.reduce_sum(outputs * targets)
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert forms(ops) == {"w": "contraction"}
    fed = aligned([2, 6], np.float64)
    expected = 0
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        session.run(ops.zero_ops)
        for n, feed in enumerate(make_feeds([2] * 9)):
            fed[:] = n + 1
            session.run(ops.accum_ops, {hidden: fed, targets: feed[targets]})
            expected += fed.T.dot(feed[targets])
        session.run(ops.train_op)
        np.testing.assert_allclose(before - session.run(w),
                                   0.125 * expected, 1e-11, 1e-12)


@pytest.mark.parametrize("when", ["between micro-batches", "before", "within"])
def test_factor_that_is_a_variable_updated_in_place(
        graph, use_resource, monkeypatch, when):
    fold_beyond(monkeypatch, 10 ** 6)
    x = tf.placeholder(tf.float64, [4, 16])
    buffer = tf.get_variable("buffer", [4, 16], tf.float64, trainable=False,
                             initializer=tf.zeros_initializer(),
                             use_resource=use_resource)
    w = weights(16, 8)
    slowly = x
    for _ in range(20):
        slowly = tf.matmul(slowly, tf.eye(16, dtype=tf.float64))
    fill = tf.assign(buffer, slowly)
    features = buffer if use_resource is False else buffer.read_value()
    if when == "within":
        # A reference variable's value is its memory: the product reads it
        # after the assignment, whenever the tensor was made.
        with tf.control_dependencies([fill]):
            if use_resource:
                features = buffer.read_value()
            outputs = tf.matmul(features, w)
    else:
        outputs = tf.matmul(features, w)
    ops = accumgrad.build_accumulation_ops(
        0.5 * tf.nn.l2_loss(outputs), tf.train.GradientDescentOptimizer(1.))
    assert forms(ops) == {"w": "contraction"}
    expected = 0
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        session.run(ops.zero_ops)
        for n in range(8):
            values = np.random.RandomState(n).randn(4, 16)
            if when != "within":
                session.run(fill.op, {x: values})
            session.run(ops.accum_ops, {x: values})
            expected += 0.5 * values.T.dot(values.dot(before))
            if when == "between micro-batches":
                session.run(fill.op, {x: values + n})
        session.run(ops.train_op)
        np.testing.assert_allclose(
            before - session.run(w), expected, 1e-11, 1e-11)


def test_factor_that_is_an_assignment(graph, use_resource, monkeypatch):
    fold_beyond(monkeypatch, 10 ** 6)
    w = weights(6, 5)
    x = examples(2, 6)
    buffer = tf.get_variable("buffer", [2, 6], tf.float64, trainable=False,
                             initializer=tf.zeros_initializer(),
                             use_resource=use_resource)
    outputs = tf.tanh(tf.matmul(tf.assign(buffer, x), w))
    check(tf.reduce_sum(outputs), make_feeds())


# What is not computed, and not kept.

def ops_that_run(session, fetches, feed):
    metadata = tf.RunMetadata()
    session.run(fetches, feed, run_metadata=metadata, options=tf.RunOptions(
        trace_level=tf.RunOptions.FULL_TRACE))
    return {node.node_name for device in metadata.step_stats.dev_stats
            for node in device.node_stats}


@pytest.mark.parametrize("form", [
    one_layer, weight_decay, kernel_that_covers_the_input,
    decayed_convolution], ids=lambda form: form.__name__)
def test_gradient_is_not_computed_with_a_micro_batch(graph, monkeypatch,
                                                     form, door):
    # Neither the product nor, where there is one, the constant term.
    fold_beyond(monkeypatch, 10 ** 6)
    loss = total(form(None))
    [w] = tf.trainable_variables()
    for choice, expected in [("dense", "dense"), ("auto", "contraction")]:
        num_ops = len(graph.get_operations())
        trainer = door(loss, sgd(), 100, accumulators=choice)
        assert accumgrad.describe_accumulators()[-1].form == expected
        products, terms = [
            {op.name for op in graph.get_operations()[num_ops:]
             if op.type in types and op.name.startswith("gradients")
             and op.outputs[0].shape.as_list() == w.shape.as_list()}
            for types in [("MatMul", "Conv2DBackpropFilter"),
                          ("MatMul", "Conv2DBackpropFilter", "Mul")]]
        assert products
        [feed] = make_feeds([1])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            trainer.accumulate(session, [feed])
            ran = ops_that_run(session, trainer.micro_batch_op, feed)
        assert products <= ran if choice == "dense" else not terms & ran


def state(session, variable):
    """Returns the contraction's `[num_rows]`, and the sum's shape."""
    local = {other.op.name.split("/", 1)[1]: other
             for other in tf.local_variables()}
    prefix = variable.op.name
    return session.run([
        local[prefix + "/num_rows"],
        tf.shape(local[prefix + "/accumulator"].read_value()),
        tf.shape(concat(local[prefix + "/left"], variable)),
    ])


def concat(tensor_list, variable):
    return tf.raw_ops.TensorListConcatV2(
        input_handle=tensor_list.read_value(), element_dtype=tf.float64,
        element_shape=[-1, variable.shape.as_list()[0]],
        leading_dims=tf.zeros([0], tf.int64)).tensor


def test_stored_rows_stay_below_the_limit(graph):
    # A quarter of k (24 + 40) = 24 x 40: 3 rows.
    w = weights(24, 40)
    x = examples(None, 24)
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.matmul(x, w)), sgd())
    assert forms(ops) == {"w": "contraction"}
    seen = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)
        for size in [1, 2, 1, 1, 5, 0, 3, 1] + [1] * 30:
            session.run(ops.accum_ops, {x: np.ones([size, 24])})
            num_rows, sum_shape, stored_shape = state(session, w)
            seen.append((num_rows, list(sum_shape)))
            assert list(stored_shape) == [num_rows, 24]
            assert num_rows <= 3
    # The dense sum takes no memory before it is needed.
    assert seen[:8] == [
        (1, []), (3, []), (0, [24, 40]), (1, [24, 40]), (0, [24, 40]),
        (0, [24, 40]), (3, [24, 40]), (0, [24, 40])]


def test_micro_batch_of_more_rows_than_the_limit_is_dense(graph):
    loss = tf.reduce_sum(tf.matmul(examples(4, 24), weights(24, 40)))
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert reasons(ops) == {
        "w": "a micro-batch's factors are larger than a quarter of it"}


def test_variable_for_which_a_row_is_too_much_is_dense(graph):
    loss = tf.reduce_sum(tf.matmul(examples(None, 100), weights(100, 1)))
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert reasons(ops) == {
        "w": "a micro-batch's factors are larger than a quarter of it"}


def test_zeroing_gives_the_sum_back(graph, monkeypatch):
    fold_beyond(monkeypatch, 1)
    w = weights(6, 5)
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.matmul(examples(None, 6), w)), sgd())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)
        for feed in make_feeds([2, 1]):
            session.run(ops.accum_ops, feed)
        assert list(state(session, w)[1]) == [6, 5]
        session.run(ops.zero_ops)
        local = {variable.op.name: variable
                 for variable in tf.local_variables()}
        assert session.run(local["accumgrad/w/accumulator"]).shape == ()
        assert session.run(local["accumgrad/w/num_rows"]) == 0


# Dtypes.

@pytest.mark.parametrize("dtype, tolerance", [
    # Factors and result are rounded, and what is between them.
    (tf.float16, 2e-3), (tf.bfloat16, 2e-2), (tf.float32, 1e-6),
    (tf.float64, 1e-13)], ids=["float16", "bfloat16", "float32", "float64"])
def test_dtypes(graph, folding, dtype, tolerance):
    # Small integers, exact in every dtype; sums of 9 x 2 x 4 products.
    x, d = [tf.placeholder(dtype, [None, size]) for size in (6, 5)]
    w = tf.get_variable("w", [6, 5], dtype, tf.zeros_initializer())
    gradient = tf.matmul(x, d, transpose_a=True)
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(x), GivenPairs([(gradient, w)]))
    assert forms(ops) == {"w": "contraction"}
    random = np.random.RandomState(0)
    feeds = [{x: random.randint(-4, 5, [2, 6]),
              d: random.randint(-4, 5, [2, 5])} for _ in range(9)]
    expected = sum(feed[x].T.dot(feed[d]) for feed in feeds)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, feeds)
        np.testing.assert_allclose(
            -session.run(tf.cast(w, tf.float64)), expected, tolerance,
            tolerance)


def test_sum_of_products_outlives_float16(graph, monkeypatch):
    # 2048 + 1 is 2048 in float16.
    fold_beyond(monkeypatch, 1)
    x, d = [tf.placeholder(tf.float16, [1, size]) for size in (6, 5)]
    w = tf.get_variable("w", [6, 5], tf.float16, tf.zeros_initializer())
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(x),
        GivenPairs([(tf.matmul(x, d, transpose_a=True), w)]))
    assert forms(ops) == {"w": "contraction"}
    with tf.Session() as session:
        session.run(w.initializer)
        accumgrad.run_cycle(session, ops, [
            {x: np.full([1, 6], size), d: np.ones([1, 5])}
            for size in [2048] + [1] * 8])
        np.testing.assert_array_equal(session.run(w), np.full([6, 5], -2056))


@pytest.mark.parametrize("kind", KINDS)
def test_float16_layer_of_float32_variables(graph, folding, kind):
    # The cast of the gradient to float32 is read through.  Integers: exact.
    x, d = [tf.placeholder(tf.float16, [None, size]) for size in (6, 5)]
    w = tf.get_variable("w", [6, 5], use_resource=kind,
                        initializer=tf.ones_initializer())
    loss = tf.reduce_sum(tf.cast(
        tf.matmul(x, tf.cast(w, tf.float16)) * d, tf.float32)) + (
            0.5 * tf.nn.l2_loss(w))
    ops = accumgrad.build_accumulation_ops(
        loss, tf.train.GradientDescentOptimizer(1.))
    described = accumgrad.describe_accumulators(ops)[0]
    assert described[2:] == ("contraction", "MatMul + constant", 120, None)
    random = np.random.RandomState(0)
    feeds = [{x: random.randint(-4, 5, [2, 6]),
              d: random.randint(-4, 5, [2, 5])} for _ in range(9)]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, feeds)
        np.testing.assert_array_equal(
            session.run(w),
            1 - sum(feed[x].T.dot(feed[d]) for feed in feeds) - 9 * 0.5)


def test_products_of_two_dtypes_are_dense(graph, monkeypatch):
    fold_beyond(monkeypatch, 10 ** 6)
    x = examples(None, 6, dtype=tf.float32)
    w = weights(6, 5, dtype=tf.float32)
    half = tf.matmul(tf.cast(x, tf.float16), tf.cast(w, tf.float16))
    loss = total([tf.tanh(tf.matmul(x, w)),
                  tf.tanh(tf.cast(half, tf.float32))])
    # Half precision's products are themselves no better than 1e-3.
    ops = check(loss, make_feeds(), num_cycles=1, rtol=1e-5, atol=1e-5)
    assert reasons(ops) == {
        "w": "it sums matrix products of different sizes or dtypes"}


def test_float64_product_of_a_float32_variable_is_dense(graph, monkeypatch):
    # Its factors may be out of float32's range where it is not.
    fold_beyond(monkeypatch, 10 ** 6)
    x, w = examples(None, 6), weights(6, 5, dtype=tf.float32)
    loss = 1e-200 * tf.reduce_sum(
        tf.matmul(1e200 * x, tf.cast(w, tf.float64)))
    ops = check(loss, make_feeds(), num_cycles=1, rtol=1e-5, atol=1e-5)
    assert reasons(ops) == {"w": "Cast" + NO_PRODUCT}


# Odd uses.

def test_partitioned_variable(graph, monkeypatch):
    fold_beyond(monkeypatch, 10 ** 6)
    with tf.variable_scope("", partitioner=tf.fixed_size_partitioner(2)):
        w = tf.get_variable("w", [6, 5], tf.float64, tf.ones_initializer())
    outputs = tf.tanh(tf.matmul(examples(None, 6), w))
    ops = check(tf.reduce_sum(outputs), make_feeds())
    assert forms(ops) == {"w/part_0": "dense", "w/part_1": "dense"}


def test_parts_that_are_layers_of_their_own(graph, folding):
    with tf.variable_scope("", partitioner=tf.fixed_size_partitioner(2)):
        first, second = tf.get_variable("w", [6, 5], tf.float64,
                                        tf.ones_initializer())
    outputs = (tf.tanh(tf.matmul(examples(None, 3), first))
               + tf.tanh(tf.matmul(examples(None, 3), second)))
    ops = check(tf.reduce_sum(outputs), make_feeds())
    assert forms(ops) == {"w/part_0": "contraction",
                          "w/part_1": "contraction"}


def test_unknown_static_shape_is_dense(graph, monkeypatch):
    fold_beyond(monkeypatch, 10 ** 6)
    initial = tf.placeholder_with_default(np.ones([6, 5]), None)
    w = tf.get_variable("w", initializer=initial, validate_shape=False)
    ops = check(tf.reduce_sum(tf.matmul(examples(None, 6), w)), make_feeds())
    assert reasons(ops) == {"w": "the variable's static shape is unknown"}


def test_unknown_static_shape_of_the_factors(graph, folding):
    w, x = weights(6, 5), tf.placeholder(tf.float64, [None, None])
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.matmul(x, w)), sgd())
    assert reasons(ops) == {"w": "MatMul"}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        accumgrad.run_cycle(session, ops, [{x: np.ones([4, 6])}] * 3)
        np.testing.assert_allclose(before - session.run(w),
                                   np.full([6, 5], 0.125 * 12))


def test_two_builders_share_a_layer(graph, folding):
    # Two players' losses of the same features, each with its own decay.
    x = examples(None, 6)
    a, b = weights(6, 5, name="a"), weights(6, 5, name="bb")
    loss = tf.reduce_sum(tf.tanh(tf.matmul(x, a)) * tf.tanh(tf.matmul(x, b)))
    losses = [loss + 0.1 * tf.nn.l2_loss(a), -loss + 0.1 * tf.nn.l2_loss(b)]
    gradients = [tf.gradients(one, v)[0] for one, v in zip(losses, [a, b])]
    both = [accumgrad.build_accumulation_ops(one, sgd(), [v])
            for one, v in zip(losses, [a, b])]
    for ops, name in zip(both, ["a", "bb"]):
        assert reasons(ops) == {name: "MatMul + constant"}
    feeds = make_feeds()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run([a, b])
        expected = [sum(values) for values in zip(*[
            session.run(gradients, feed) for feed in feeds])]
        session.run([ops.zero_ops for ops in both])
        for feed in feeds:
            session.run([ops.accum_ops for ops in both], feed)
        session.run(both[0].train_op)
        session.run(both[1].train_op)
        for old, new, gradient in zip(before, session.run([a, b]), expected):
            np.testing.assert_allclose(new, old - 0.125 * gradient, RTOL,
                                       ATOL)


@pytest.mark.parametrize("kind", KINDS)
def test_train_op_leaves_the_accumulators(graph, folding, kind):
    # Run twice, it applies the same sum twice; and goes on from it.
    w, x = weights(6, 5, use_resource=kind), examples(None, 6)
    d = examples(None, 5)
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.matmul(x, w) * d), sgd())
    assert forms(ops) == {"w": "contraction"}
    feeds = make_feeds()
    products = [feed[x].T.dot(feed[d]) for feed in feeds]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        session.run(ops.zero_ops)
        for feed in feeds[:5]:
            session.run(ops.accum_ops, feed)
        session.run(ops.train_op)
        session.run(ops.train_op)
        for feed in feeds[5:]:
            session.run(ops.accum_ops, feed)
        session.run(ops.train_op)
        np.testing.assert_allclose(
            before - session.run(w),
            0.125 * (2 * sum(products[:5]) + sum(products)), 1e-11, 1e-12)


def test_interrupted_cycles_leave_nothing(graph, folding):
    w, x = weights(6, 5), examples(None, 6)
    loss = tf.reduce_sum(tf.tanh(tf.matmul(x, w))) + 0.1 * tf.nn.l2_loss(w)
    gradient = tf.gradients(loss, w)[0]
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert forms(ops) == {"w": "contraction"}
    feeds = make_feeds()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)  # the first cycle is of two, and dropped
        for feed in feeds[:2]:
            session.run(ops.accum_ops, feed)
        for length in (1, 9, 4):  # so is each first of these
            with pytest.raises(tf.errors.InvalidArgumentError):
                accumgrad.run_cycle(session, ops, feeds[:length] + [{}])
            before = session.run(w)
            expected = sum(session.run(gradient, feed)
                           for feed in feeds[:length])
            accumgrad.run_cycle(session, ops, feeds[:length])
            np.testing.assert_allclose(
                session.run(w), before - 0.125 * expected, RTOL, ATOL)


def test_micro_batch_that_fails_is_not_half_stored(graph, monkeypatch):
    # The factors come from before and after the check that fails.
    fold_beyond(monkeypatch, 10 ** 6)
    w, x, d = weights(6, 5), examples(None, 6), examples(None, 5)
    outputs = tf.matmul(x, w)
    with tf.control_dependencies([
            tf.Assert(tf.reduce_all(tf.is_finite(d)), ["not finite"])]):
        loss = tf.reduce_sum(outputs * tf.identity(d))
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert forms(ops) == {"w": "contraction"}
    good = make_feeds([2, 2, 2])
    bad = {x: np.ones([2, 6]), d: np.full([2, 5], np.nan)}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        session.run(ops.zero_ops)
        for feed in good:
            session.run(ops.accum_ops, feed)
            with pytest.raises(tf.errors.InvalidArgumentError,
                               match="not finite"):
                session.run(ops.accum_ops, bad)
        session.run(ops.train_op)
        np.testing.assert_allclose(
            before - session.run(w),
            0.125 * sum(feed[x].T.dot(feed[d]) for feed in good), RTOL, ATOL)


def test_nothing_accumulated_is_an_error_and_changes_nothing(graph):
    w, loss = decayed_layer(0.25)
    w2 = weights(24, 40, name="w22")
    ops = accumgrad.build_accumulation_ops(
        loss + tf.reduce_sum(tf.matmul(examples(None, 24), w2)), sgd())
    assert forms(ops)["w22"] == "contraction"
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)
        before = session.run([w, w2])
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match="nothing accumulated since zero_ops"):
            session.run(ops.train_op)
        for old, new in zip(before, session.run([w, w2])):
            np.testing.assert_array_equal(old, new)


def test_micro_batches_without_examples(graph, folding):
    w, x = weights(6, 5), examples(None, 6)
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.matmul(x, w)), sgd())
    assert forms(ops) == {"w": "contraction"}
    nothing = {x: np.zeros([0, 6])}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        accumgrad.run_cycle(session, ops, [nothing] * 3)
        np.testing.assert_array_equal(session.run(w), before)
        accumgrad.run_cycle(session, ops, [
            nothing, {x: np.ones([9, 6])}, nothing, {x: np.ones([2, 6])},
            nothing])
        np.testing.assert_allclose(before - session.run(w),
                                   np.full([6, 5], 0.125 * 11), 1e-12)


def test_infinity_does_not_outlive_its_cycle(graph, folding):
    w, x = weights(6, 5), examples(None, 6)
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.matmul(x, w)), sgd())
    assert forms(ops) == {"w": "contraction"}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(w)
        session.run(ops.zero_ops)
        for _ in range(3):
            session.run(ops.accum_ops, {x: np.full([4, 6], np.inf)})
        accumgrad.run_cycle(session, ops, [{x: np.ones([4, 6])}] * 3)
        np.testing.assert_allclose(before - session.run(w),
                                   np.full([6, 5], 0.125 * 12), 1e-12)


def test_small_variables_are_dense(graph, monkeypatch):
    monkeypatch.setattr(accumulators, "MIN_ELEMENTS_TO_DEFER", 24 * 40 + 1)
    loss = tf.reduce_sum(tf.matmul(examples(None, 24), weights(24, 40)))
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert reasons(ops) == {"w": "it is small"}
