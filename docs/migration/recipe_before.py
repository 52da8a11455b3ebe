import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.set_random_seed(0)
x = tf.placeholder(tf.float32, [None, 3])
y = tf.placeholder(tf.float32, [None, 1])
weights = tf.get_variable("weights", [3, 1])
loss = tf.reduce_sum(tf.squared_difference(tf.matmul(x, weights), y))
optimizer = tf.train.AdamOptimizer(0.1)

variables = tf.trainable_variables()
sums = [tf.Variable(tf.zeros_like(v.initialized_value()), trainable=False)
        for v in variables]
zero_ops = [s.assign(tf.zeros_like(s)) for s in sums]
pairs = optimizer.compute_gradients(loss, variables)
accum_ops = [s.assign_add(g) for s, (g, _) in zip(sums, pairs)]
train_op = optimizer.apply_gradients(
    [(s, v) for s, (_, v) in zip(sums, pairs)])

xs = np.random.RandomState(0).randn(10, 128, 1, 3)
ys = xs.sum(axis=3, keepdims=True)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for cycle in range(10):
        session.run(zero_ops)
        for i in range(128):
            session.run(accum_ops, {x: xs[cycle, i], y: ys[cycle, i]})
        session.run(train_op)
    tf.train.Saver().save(session, os.path.join(sys.argv[1], "model"))
