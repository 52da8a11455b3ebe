import sys

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import accumgrad


def input_fn():
    images, labels = load_digits(return_X_y=True)
    return tf.data.Dataset.from_tensor_slices(
        (images.astype(np.float32) / 16.0, labels)).repeat().batch(4)


def model_fn(features, labels, mode):
    logits = tf.layers.dense(
        features, 10, kernel_initializer=tf.zeros_initializer())
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    optimizer = accumgrad.AccumulatingOptimizer(
        tf.train.AdamOptimizer(0.01), 8, reduction="mean")
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


config = tf.estimator.RunConfig(tf_random_seed=0, log_step_count_steps=None)
estimator = tf.estimator.Estimator(model_fn, sys.argv[1], config)
estimator.train(input_fn, max_steps=int(sys.argv[2]))
