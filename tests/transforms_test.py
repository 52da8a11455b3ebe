"""`transform_gradients` and `clip_by_global_norm`: once a cycle."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from models import assert_close, build_model, read_variables, train_plainly
from optimizers import sgd
from recipe import OPTIMIZERS


def numpy_clip(gradients, clip_norm):
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients))
    return [g * min(1.0, clip_norm / norm) for g in gradients]


@pytest.fixture
def w(graph):
    return tf.get_variable("w", [2], tf.float64, tf.zeros_initializer())


# Clipping.

@pytest.mark.parametrize("reduction, clip_norm", [
    ("sum", 0.01), ("mean", 0.01), ("sum", 1e6)])
def test_clipping_is_of_the_cycles_gradient(graph, form, door, reduction,
                                            clip_norm):
    sizes = [2, 3, 1, 2]
    model = build_model()
    optimizer = sgd()
    gradients = [tf.convert_to_tensor(gradient) for gradient, _
                 in optimizer.compute_gradients(model.loss)]
    trainer = door(
        model.loss, optimizer, 4, reduction=reduction, accumulators=form,
        transform_gradients=accumgrad.clip_by_global_norm(clip_norm))
    feeds = model.feeds(sizes)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(tf.trainable_variables())
        totals = [np.sum(values, axis=0) for values in zip(
            *[session.run(gradients, feed) for feed in feeds])]
        if reduction == "mean":
            totals = [total / len(feeds) for total in totals]
        trainer.run_cycle(session, feeds)
        moved = [old - new for old, new in zip(
            before, session.run(tf.trainable_variables()))]
        for expected, found in zip(numpy_clip(totals, clip_norm), moved):
            np.testing.assert_allclose(found, expected, 1e-10, 1e-13)


def test_aligned_large_gradients_give_the_clip_norm(w, door):
    x = tf.placeholder(tf.float64, [2])
    trainer = door(tf.reduce_sum(w * x), sgd(), 128,
                   transform_gradients=accumgrad.clip_by_global_norm(2.5))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: [3e6, 4e6]}] * 128)
        np.testing.assert_allclose(session.run(w), [-1.5, -2.0], 1e-12)


def test_row_that_is_hit_again_and_again(graph, form, door):
    # Each micro-batch's gradient is 3 at row 0; each occurrence by itself
    # would have a norm of 3 sqrt(N), not 3 N.
    table = tf.get_variable("table", [4, 1], initializer=tf.ones_initializer())
    x = tf.placeholder(tf.float32, [])
    loss = x * tf.reduce_sum(tf.gather(table, [0]))
    trainer = door(loss, sgd(), accumulators=form,
                   transform_gradients=accumgrad.clip_by_global_norm(1.0))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for num_micro_batches in (2, 4, 8, 16):
            session.run(table.initializer)
            trainer.run_cycle(session, [{x: 3}] * num_micro_batches)
            np.testing.assert_allclose(session.run(table)[:, 0], [0, 1, 1, 1],
                                       atol=1e-6)


def test_clip_adds_up_repeated_rows(graph):
    # Row 0 has 1 + 2, row 2 has 4: a norm of 5.
    table = tf.get_variable("table", [3, 1], tf.float64)
    slices = tf.IndexedSlices(tf.constant([[1.0], [4.0], [2.0]], tf.float64),
                              tf.constant([0, 2, 0]), tf.constant([3, 1]))
    [(clipped, variable)] = accumgrad.clip_by_global_norm(1.0)(
        [(slices, table)])
    assert variable is table
    with tf.Session() as session:
        dense, shape = session.run([tf.convert_to_tensor(clipped),
                                    clipped.dense_shape])
    np.testing.assert_allclose(dense, [[0.6], [0], [0.8]], 1e-12)
    assert list(shape) == [3, 1]


def test_clip_leaves_small_gradients_bit_for_bit(graph):
    values = np.random.RandomState(0).randn(100).astype(np.float32) / 100
    w = tf.get_variable("w", [100])
    [(clipped, _)] = accumgrad.clip_by_global_norm(1.0)(
        [(tf.constant(values), w)])
    with tf.Session() as session:
        np.testing.assert_array_equal(session.run(clipped), values)


def test_clip_of_several_dtypes(graph):
    # The norm of the half is beyond float16: 300 ** 2 > 65504.
    pairs = [(tf.constant([300.0], dtype), tf.get_variable(dtype.name, [1],
                                                           dtype))
             for dtype in (tf.float16, tf.float32, tf.float64)]
    clipped = accumgrad.clip_by_global_norm(tf.constant(3.0))(pairs)
    assert [gradient.dtype for gradient, _ in clipped] == [
        tf.float16, tf.float32, tf.float64]
    with tf.Session() as session:
        for (value, _), eps in zip(clipped, [1e-3, 1e-6, 1e-6]):
            np.testing.assert_allclose(session.run(value), [3 ** 0.5], eps)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_clip_to_a_norm_that_is_not_finite_makes_all_nan(graph, bad):
    pairs = [(tf.constant([1.0]), tf.get_variable("a", [1])),
             (tf.constant([bad], tf.float32), tf.get_variable("b", [1]))]
    clipped = accumgrad.clip_by_global_norm(1.0)(pairs)
    theirs, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs],
                                       1.0)
    with tf.Session() as session:
        for (ours, _), value in zip(clipped, theirs):
            assert np.isnan(session.run([ours, value])).all()


@pytest.mark.parametrize("clip_norm, error, message", [
    (0, ValueError, "above 0 and finite; got 0"),
    (-1.0, ValueError, "above 0 and finite; got -1.0"),
    (float("nan"), ValueError, "above 0 and finite; got nan"),
    (float("inf"), ValueError, "above 0 and finite; got inf"),
    ("1", TypeError, "got '1'"),
    (True, TypeError, "got True"),
    (None, TypeError, "got None"),
    (lambda: tf.ones([2]), TypeError, r"scalar .* shape \(2,\)"),
    (lambda: tf.constant(1), TypeError, "floating-point .* int32"),
])
def test_bad_clip_norm(graph, clip_norm, error, message):
    clip_norm = clip_norm() if callable(clip_norm) else clip_norm
    with pytest.raises(error, match="`clip_norm` must be .*" + message):
        accumgrad.clip_by_global_norm(clip_norm)


# Transforms of one's own.

@pytest.fixture
def pair(graph):
    """Two variables of one element, both at 1, and a loss of gradients x."""
    a, b = [tf.get_variable(name, [], tf.float64, tf.ones_initializer())
            for name in "ab"]
    x = tf.placeholder(tf.float64, [])
    return a, b, x, a * x + 10 * b * x


def run(pair, door, transform, optimizer=None):
    a, b, x, loss = pair
    trainer = door(loss, optimizer or sgd(), 3, transform_gradients=transform)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: 1}, {x: 2}, {x: 3}])
        return session.run([a, b])


def test_transform_sees_reduced_gradients_once(pair, door):
    a, b, _, _ = pair
    calls = []

    def square(grads_and_vars):
        calls.append([variable for _, variable in grads_and_vars])
        return [(gradient ** 2, variable)
                for gradient, variable in grads_and_vars]
    assert run(pair, door, square) == [1 - 6 ** 2, 1 - 60 ** 2]
    assert calls == [[a, b]]


@pytest.mark.parametrize("drop", [
    lambda pairs: pairs[:1], lambda pairs: [pairs[0], (None, pairs[1][1])]])
def test_dropped_variable_rests(pair, door, drop):
    # Under Momentum with a slot that is not zero.
    a, b, x, loss = pair
    optimizer = tf.train.MomentumOptimizer(1.0, 0.5)
    move = optimizer.apply_gradients([(tf.ones_like(a), a),
                                      (tf.ones_like(b), b)])
    trainer = door(loss, optimizer, 2, transform_gradients=drop)
    slot = optimizer.get_slot(b, "momentum")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(move)
        assert session.run([a, b, slot]) == [0, 0, 1]
        trainer.run_cycle(session, [{x: 1}, {x: 2}])
        assert session.run([a, b, slot]) == [-3.5, 0, 1]


def test_reordered_pairs_stay_pairs(pair, door):
    assert run(pair, door, lambda pairs: reversed(pairs)) == [-5, -59]


def test_gradient_that_is_replaced(pair, door):
    assert run(pair, door, lambda pairs: [
        (tf.constant(0.5), variable) for _, variable in pairs]) == [0.5, 0.5]


def test_dense_gradient_in_place_of_rows(graph, form, door):
    expected = train_plainly(OPTIMIZERS["Momentum"], [([2, 3], 0)], "dense")
    model = build_model()
    trainer = door(
        model.loss, OPTIMIZERS["Momentum"](), 2, accumulators=form,
        reduction="mean", weight=model.size,
        transform_gradients=lambda pairs: [
            (tf.convert_to_tensor(gradient), variable)
            for gradient, variable in pairs])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, model.feeds([2, 3]))
        assert_close(read_variables(session), expected[0])


@pytest.mark.parametrize("junk, error, message", [
    (lambda pairs: None, TypeError, "list of pairs .* got None"),
    (lambda pairs: pairs[0][0], TypeError, "list of pairs .* got <tf.Tensor"),
    (lambda pairs: [gradient for gradient, _ in pairs], TypeError,
     "pairs .gradient, variable.; got <tf.Tensor"),
    (lambda pairs: [(1.0, variable) for _, variable in pairs], TypeError,
     "each a tf.Tensor, tf.IndexedSlices or None; got 1.0"),
    (lambda pairs: [(np.ones(()), variable) for _, variable in pairs],
     TypeError, "each a tf.Tensor, .* got array"),
    (lambda pairs: [(gradient, "a") for gradient, _ in pairs], TypeError,
     "each gradient with a variable; got 'a'"),
    (lambda pairs: [(tf.constant(1), variable) for _, variable in pairs],
     TypeError, "one of int32 for 'a' of float64"),
    (lambda pairs: [(tf.ones([2], tf.float64), variable)
                    for _, variable in pairs],
     ValueError, r"shape; got one of \(2,\) for 'a' of \(\)"),
    (lambda pairs: [], ValueError, r"at least one gradient; got \[\]"),
    (lambda pairs: pairs + pairs[:1], ValueError, "more than once are: a"),
    (lambda pairs: [(pairs[0][0], tf.get_variable("c", [], tf.float64))],
     ValueError, "'c', which is none of them: a, b"),
])
def test_junk_from_a_transform(pair, door, junk, error, message):
    _, _, _, loss = pair
    with pytest.raises(error, match="`transform_gradients` .*" + message):
        door(loss, sgd(), 2, transform_gradients=junk)


def test_transform_must_be_a_function(pair, door):
    _, _, _, loss = pair
    num_ops = len(loss.graph.get_operations())
    with pytest.raises(TypeError, match="`transform_gradients` must be a fun"
                       ".*got 1.0"):
        door(loss, sgd(), 2, transform_gradients=1.0)
    assert len(loss.graph.get_operations()) == num_ops
