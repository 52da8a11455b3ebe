import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

import accumgrad

tf.disable_v2_behavior()
hvd.init()
x = tf.placeholder(tf.float32, [None, 3])
y = tf.placeholder(tf.float32, [None, 1])
weights = tf.get_variable("weights", [3, 1],
                          initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.squared_difference(tf.matmul(x, weights), y))
step = tf.train.get_or_create_global_step()
optimizer = tf.train.AdamOptimizer(0.1)


def average_over_workers(grads_and_vars):
    return [(hvd.allreduce(gradient), variable)
            for gradient, variable in grads_and_vars]


train_op = accumgrad.AccumulatingOptimizer(
    optimizer, 8, transform_gradients=average_over_workers).minimize(
        loss, step)

xs = np.random.RandomState(hvd.rank()).randn(80, 1, 3)
ys = xs.sum(axis=2, keepdims=True)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(hvd.broadcast_global_variables(0))
    for i in range(80):
        session.run(train_op, {x: xs[i], y: ys[i]})
    if hvd.rank() == 0:
        tf.train.Saver().save(session, os.path.join(sys.argv[1], "model"))
