import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.set_random_seed(0)
x = tf.placeholder(tf.float32, [None, 3])
y = tf.placeholder(tf.float32, [None, 1])
weights = tf.get_variable("weights", [3, 1])
loss = tf.reduce_mean(tf.squared_difference(tf.matmul(x, weights), y))
step = tf.train.get_or_create_global_step()
optimizer = tf.train.AdamOptimizer(0.1)

pairs = optimizer.compute_gradients(loss)
sums = [tf.get_variable(f"sum_{i}", v.shape, trainable=False,
                        initializer=tf.zeros_initializer())
        for i, (_, v) in enumerate(pairs)]
micro_step = tf.get_variable("micro_step", [], tf.int64, trainable=False,
                             initializer=tf.zeros_initializer())


def update():
    means = [s.read_value() / 8 for s in sums]
    with tf.control_dependencies([optimizer.apply_gradients(
            [(m, v) for m, (_, v) in zip(means, pairs)], step)]):
        return tf.group(*[s.assign(tf.zeros(s.shape)) for s in sums])


with tf.control_dependencies(
        [s.assign_add(g) for s, (g, _) in zip(sums, pairs)]):
    count = tf.assign_add(micro_step, 1)
train_op = tf.cond(tf.equal(count % 8, 0), update, tf.no_op)

xs = np.random.RandomState(0).randn(80, 1, 3)
ys = xs.sum(axis=2, keepdims=True)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for i in range(80):
        session.run(train_op, {x: xs[i], y: ys[i]})
    tf.train.Saver().save(session, os.path.join(sys.argv[1], "model"))
