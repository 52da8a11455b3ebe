"""Half precision: summed in float32, and cast back at the end."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from optimizers import sgd

HALF = [tf.float16, tf.bfloat16]


def half_variable(dtype, *shape):
    return tf.get_variable("w", shape, dtype, use_resource=True,
                           initializer=tf.zeros_initializer())


@pytest.mark.parametrize("dtype", HALF)
def test_variable_receives_4096_gradients_of_one(graph, form, door, dtype):
    # One by one, in float16 the sum would stop at 2,048, in bfloat16 at 256.
    w = half_variable(dtype, 2, 3)
    x = tf.placeholder(dtype, [None, 2])
    loss = tf.reduce_sum(tf.matmul(x, w))
    trainer = door(loss, sgd(), 4096, accumulators=form)
    ones = np.ones([1, 2], dtype.as_numpy_dtype)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: ones}] * 4096)
        np.testing.assert_array_equal(
            session.run(tf.cast(w, tf.float32)), np.full([2, 3], -4096.0))


def test_rows_receive_4096_gradients_of_one(graph, form, door):
    table = half_variable(tf.float16, 4, 2)
    ids = tf.placeholder(tf.int32, [None])
    trainer = door(tf.reduce_sum(tf.gather(table, ids)), sgd(), 1024,
                   accumulators=form)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{ids: [1, 1, 3, 1, 1]}] * 1024)
        values = session.run(tf.cast(table, tf.float32))
    np.testing.assert_array_equal(values[:, 0], [0, -4096, 0, -1024])


def test_mean_is_cast_back_after_the_division(graph, form, door):
    # The sum, 128 times 1,024, is beyond float16; the mean is not.
    w = half_variable(tf.float16, 2, 3)
    x = tf.placeholder(tf.float16, [None, 2])
    trainer = door(tf.reduce_sum(tf.matmul(x, w)), sgd(), 128,
                   accumulators=form, reduction="mean")
    value = np.full([1, 2], 1024, np.float16)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: value}] * 128)
        np.testing.assert_array_equal(
            session.run(tf.cast(w, tf.float32)), np.full([2, 3], -1024.0))


def test_weight_beyond_half_precision(graph, form, door):
    # 2 ** 20 tokens of gradient 2 ** -20 each.
    w = half_variable(tf.float16, 2, 3)
    x = tf.placeholder(tf.float16, [None, 2])
    trainer = door(tf.reduce_sum(tf.matmul(x, w)), sgd(), 2,
                   accumulators=form, weight=2 ** 20)
    value = np.full([1, 2], 2.0 ** -20, np.float16)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: value}] * 2)
        np.testing.assert_array_equal(
            session.run(tf.cast(w, tf.float32)), np.full([2, 3], -2.0))


def test_transform_gets_the_float32_sum(graph, form, door):
    # 128 gradients of 1,024 are beyond float16 until they are unscaled.
    w = half_variable(tf.float16, 2, 3)
    x = tf.placeholder(tf.float16, [None, 2])
    seen = []

    def unscale(grads_and_vars):
        seen.extend(gradient.dtype for gradient, _ in grads_and_vars)
        return [(gradient / 1024.0, variable)
                for gradient, variable in grads_and_vars]
    trainer = door(tf.reduce_sum(tf.matmul(x, w)), sgd(), 128,
                   accumulators=form, transform_gradients=unscale)
    value = np.full([1, 2], 1024, np.float16)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: value}] * 128)
        np.testing.assert_array_equal(session.run(w), np.full([2, 3], -128))
    assert seen == [tf.float32]


def test_loss_scaling_by_hand_trains(graph, form, door):
    # float32 variables and a float16 network, whose gradients vanish without
    # the scale: y = x w is fit to y = 2 x, in units of 2 ** -12.
    unit, scale = 2.0 ** -12, 2.0 ** 14
    w = tf.get_variable("w", [1, 1], use_resource=True,
                        initializer=tf.zeros_initializer())
    x = tf.placeholder(tf.float16, [None, 1])
    spoil = tf.placeholder_with_default(np.float16(1), [])
    y = tf.matmul(x, tf.cast(w, tf.float16)) * unit * spoil
    error = y - x * (2 * unit)
    scaled = tf.reduce_mean(tf.square(error * 2 ** 6)) * (scale / 2 ** 12)
    trainer = door(
        scaled, sgd(0.25 / unit ** 2), 4, accumulators=form,
        reduction="mean", nonfinite="skip",
        transform_gradients=lambda pairs: [
            (gradient / scale, variable) for gradient, variable in pairs])
    feeds = [{x: [[value]]} for value in (1, -1, 0.5, 1)]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(20):
            trainer.run_cycle(session, feeds)
        np.testing.assert_allclose(session.run(w), [[2]], 0.01)
        before = session.run(w)
        trainer.run_cycle(session, feeds[1:] + [{x: [[1]], spoil: np.inf}])
        np.testing.assert_array_equal(session.run(w), before)


def test_float16_network_with_float32_variables_is_exact(graph, form, door):
    # The factors are small integers, so that float16 holds them, and float32
    # their sums.
    w = tf.get_variable("w", [3, 2], initializer=tf.zeros_initializer())
    x = tf.placeholder(tf.float16, [None, 3])
    loss = tf.reduce_sum(tf.matmul(x, tf.cast(w, tf.float16)))
    trainer = door(loss, sgd(), 50, accumulators=form)
    random = np.random.RandomState(0)
    batches = [random.randint(-50, 50, [2, 3]).astype(np.float16)
               for _ in range(50)]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: batch} for batch in batches])
        total = np.concatenate(batches).astype(np.float64).sum(axis=0)
        np.testing.assert_array_equal(session.run(w),
                                      -np.stack([total, total], axis=1))


def test_reason_and_bytes_are_those_of_float32(graph, form):
    w = half_variable(tf.float16, 2, 3)
    x = tf.placeholder(tf.float16, [None, 2])
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.matmul(x, w)), sgd(), accumulators=form)
    [item] = accumgrad.describe_accumulators(ops)
    assert item.dense_bytes == 2 * 3 * 4
