import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import accumgrad

tf.disable_v2_behavior()
tf.set_random_seed(0)
x = tf.placeholder(tf.float32, [None, 3])
y = tf.placeholder(tf.float32, [None, 1])
weights = tf.get_variable("weights", [3, 1])
loss = tf.reduce_mean(tf.squared_difference(tf.matmul(x, weights), y))
step = tf.train.get_or_create_global_step()
optimizer = tf.train.AdamOptimizer(0.1)

train_op = accumgrad.AccumulatingOptimizer(
    optimizer, 8, reduction="mean").minimize(loss, step)

xs = np.random.RandomState(0).randn(80, 1, 3)
ys = xs.sum(axis=2, keepdims=True)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for i in range(80):
        session.run(train_op, {x: xs[i], y: ys[i]})
    tf.train.Saver().save(session, os.path.join(sys.argv[1], "model"))
