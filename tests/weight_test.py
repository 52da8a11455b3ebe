"""`weight`: unequal micro-batches add up to the one large batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from models import (NUM_ROWS, WIDTH, assert_close, assert_same, build_model,
                    read_variables, train_plainly)
from optimizers import sgd
from recipe import OPTIMIZERS

TOKENS = [7, 1, 31, 4]


@pytest.fixture
def w(graph):
    return tf.get_variable("w", [], tf.float64, tf.zeros_initializer())


@pytest.mark.parametrize("dtype, optimizer_name", [
    (tf.int32, "Momentum"), (tf.float32, "GradientDescent")])
def test_token_weighted_mean_is_the_concatenated_batch(
        graph, form, door, dtype, optimizer_name):
    cycles = [(TOKENS, 0), (TOKENS[::-1], 1)]
    expected = train_plainly(OPTIMIZERS[optimizer_name], cycles, form)
    model = build_model()
    trainer = door(model.loss, OPTIMIZERS[optimizer_name](), len(TOKENS),
                   reduction="mean", weight=tf.cast(model.size, dtype),
                   accumulators=form)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for (sizes, seed), whole in zip(cycles, expected):
            trainer.run_cycle(session, model.feeds(sizes, seed))
            # float64, sums of 43 terms in another order.
            assert_close(read_variables(session), whole)


def test_mean_of_means_is_something_else(w, door):
    # d/dw of mean(w x) is mean(x).
    x = tf.placeholder(tf.float64, [None])
    tokens = [np.arange(size, dtype=float) for size in TOKENS]
    loss = tf.reduce_mean(w * x)
    plain = door(loss, sgd(), 4, reduction="mean", name="plain")
    weighted = door(loss, sgd(), 4, reduction="mean", weight=tf.size(x),
                    name="weighted")
    with tf.Session() as session:
        def moved_by(trainer):
            session.run(tf.global_variables_initializer())
            trainer.run_cycle(session, [{x: values} for values in tokens])
            return -session.run(w)
        mean_of_means = np.mean([values.mean() for values in tokens])
        mean = np.concatenate(tokens).mean()
        np.testing.assert_allclose(moved_by(plain), mean_of_means, 1e-12)
        np.testing.assert_allclose(moved_by(weighted), mean, 1e-12)
        # (3 + 0 + 15 + 1.5) / 4, and (21 + 0 + 465 + 6) / 43.
        assert (mean_of_means, mean) == (4.875, 492 / 43)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_weighted_sum_and_mean(graph, form, door, reduction):
    weights = [0.5, 2.0, 0.0, 3.25]
    model = build_model()
    weight = tf.placeholder(tf.float64, [])
    optimizer = sgd()
    gradients = [tf.convert_to_tensor(gradient) for gradient, _
                 in optimizer.compute_gradients(model.loss)]
    trainer = door(model.loss, optimizer, 4, reduction=reduction,
                   weight=weight, accumulators=form)
    feeds = model.feeds([2, 1, 3, 1])
    for feed, value in zip(feeds, weights):
        feed[weight] = value
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(tf.trainable_variables())
        expected = [sum(value * gradient for value, gradient in zip(
            weights, by_micro_batch)) for by_micro_batch in zip(
                *[session.run(gradients, feed) for feed in feeds])]
        if reduction == "mean":
            expected = [total / sum(weights) for total in expected]
        trainer.run_cycle(session, feeds)
        for old, total, new in zip(before, expected,
                                   session.run(tf.trainable_variables())):
            np.testing.assert_allclose(old - new, total, 1e-12, 1e-14)


def test_micro_batch_of_weight_zero_counts_for_nothing(graph, form, door):
    # Its gradient is NaN in every element.  Under Momentum, a row of the
    # table moves if it is touched at all, be it with zeros.
    cycles = [([3, 2], 0), ([2, 4], 1)]
    expected = train_plainly(OPTIMIZERS["Momentum"], cycles, form)
    model = build_model()
    weight = tf.placeholder(tf.int32, [])
    trainer = door(model.loss, OPTIMIZERS["Momentum"](), 4, reduction="mean",
                   weight=weight, accumulators=form)
    nothing = {model.x: np.full([NUM_ROWS, WIDTH], np.nan),
               model.ids: np.arange(NUM_ROWS), weight: 0}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for (sizes, seed), whole in zip(cycles, expected):
            first, last = [
                {**feed, weight: size}
                for feed, size in zip(model.feeds(sizes, seed), sizes)]
            trainer.run_cycle(session, [nothing, first, nothing, last])
            assert_close(read_variables(session), whole)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_no_weight_at_all_is_nothing_accumulated(graph, form, reduction):
    model = build_model()
    weight = tf.placeholder(tf.float32, [])
    ops = accumgrad.build_accumulation_ops(
        model.loss, OPTIMIZERS["Adam"](), reduction=reduction, weight=weight,
        accumulators=form)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = read_variables(session)
        for feed in model.feeds([2, 3]):
            session.run(ops.zero_ops)
            session.run(ops.accum_ops, {**feed, weight: 0})
            with pytest.raises(tf.errors.InvalidArgumentError,
                               match="nothing accumulated since zero_ops"):
                session.run(ops.train_op)
        assert_same(read_variables(session), before)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_weight_accumulates_nothing(graph, form, bad):
    expected = train_plainly(sgd, [([2, 3], 0)])
    model = build_model()
    weight = tf.placeholder(tf.float64, [])
    ops = accumgrad.build_accumulation_ops(
        model.loss, sgd(), reduction="mean", weight=weight,
        accumulators=form)
    first, second = model.feeds([2, 3])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)
        session.run(ops.accum_ops, {**first, weight: 2})
        for _ in range(20):
            with pytest.raises(tf.errors.InvalidArgumentError,
                               match="`weight` must be at least 0 and finite"):
                session.run(ops.accum_ops, {**second, weight: bad})
        session.run(ops.accum_ops, {**second, weight: 3})
        session.run(ops.train_op)
        assert_close(read_variables(session), expected[0])


def test_large_integer_weights_add_up_exactly(w):
    # In float32, 2 ** 24 + 1 is 2 ** 24.
    weight = tf.placeholder(tf.int64, [])
    ops = accumgrad.build_accumulation_ops(
        w * tf.cast(weight, tf.float64), sgd(), reduction="mean",
        weight=weight)
    weights = [2 ** 24, 1, 1, 1]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, [{weight: v} for v in weights])
        np.testing.assert_allclose(
            session.run(w), -sum(v * v for v in weights) / sum(weights),
            1e-15)


def test_constant_weight(w):
    # 2 and a half times the sum of 1 and 3.
    x = tf.placeholder(tf.float64, [])
    ops = accumgrad.build_accumulation_ops(w * x, sgd(), weight=2.5)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, [{x: 1}, {x: 3}])
        assert session.run(w) == -10


@pytest.mark.parametrize("weight, error, message", [
    ("tokens", TypeError, "scalar tf.Tensor.*got 'tokens'"),
    (True, TypeError, "scalar tf.Tensor.*got True"),
    (np.ones(2), TypeError, "scalar tf.Tensor.*got array"),
    (-1, ValueError, "above 0 and finite.*got -1"),
    (0, ValueError, "above 0 and finite.*got 0"),
    (float("nan"), ValueError, "above 0 and finite.*got nan"),
    (lambda: tf.ones([2]), TypeError, r"scalar.*of shape \(2,\)"),
    (lambda: tf.constant(True), TypeError, "scalar.*dtype bool"),
    (lambda: tf.constant("2"), TypeError, "scalar.*dtype string"),
    (lambda: tf.constant(1j), TypeError, "scalar.*dtype complex128"),
])
def test_bad_argument(w, weight, error, message):
    weight = weight() if callable(weight) else weight
    loss = tf.identity(w)
    num_ops = len(w.graph.get_operations())
    with pytest.raises(error, match="`weight` must be .*" + message):
        accumgrad.build_accumulation_ops(loss, sgd(), weight=weight)
    assert len(w.graph.get_operations()) == num_ops


def test_weight_of_another_graph(w):
    with tf.Graph().as_default():
        weight = tf.constant(1.0, name="foreign")
    with pytest.raises(ValueError, match="`weight` .*'foreign:0' of another"):
        accumgrad.build_accumulation_ops(w * 1.0, sgd(), weight=weight)
