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
loss = tf.reduce_sum(tf.squared_difference(tf.matmul(x, weights), y))
optimizer = tf.train.AdamOptimizer(0.1)

ops = accumgrad.build_accumulation_ops(loss, optimizer)

xs = np.random.RandomState(0).randn(10, 128, 1, 3)
ys = xs.sum(axis=3, keepdims=True)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for cycle in range(10):
        accumgrad.run_cycle(session, ops, (
            {x: xs[cycle, i], y: ys[cycle, i]} for i in range(128)))
    tf.train.Saver().save(session, os.path.join(sys.argv[1], "model"))
