"""Trains tf-slim's VGG-16 on handwritten digits."""

import os

import numpy as np
import tensorflow.compat.v1 as tf
import tf_slim as slim
from sklearn.datasets import load_digits
from tf_slim.nets import vgg

import accumgrad

tf.disable_v2_behavior()
flags = tf.app.flags
flags.DEFINE_string("train_dir", None, "Where checkpoints are.")
flags.DEFINE_integer("batch_size", 4, "Images in a batch.")
flags.DEFINE_integer("max_steps", 1, "Steps to train in all.")
flags.DEFINE_float("keep_prob", 0.5, "Of dropout.")
flags.DEFINE_bool("freeze_batch_norm", False, "Use the moving averages.")
FLAGS = flags.FLAGS


def inputs():
    images, labels = load_digits(return_X_y=True)
    images = np.reshape(images / 16.0, [-1, 8, 8, 1]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.repeat().batch(FLAGS.batch_size)
    images, labels = tf.data.make_one_shot_iterator(dataset).get_next()
    images = tf.image.resize_images(images, [224, 224])
    return tf.tile(images, [1, 1, 1, 3]), labels


def batch_norm(x, decay=0.9):
    averages = []
    with tf.variable_scope("batch_norm"):
        for name, value, initial in zip(["mean", "variance"],
                                        tf.nn.moments(x, [0, 1, 2]), [0., 1.]):
            average = tf.get_variable(
                "moving_" + name, value.shape, trainable=False,
                initializer=tf.constant_initializer(initial))
            if FLAGS.freeze_batch_norm:
                value = average
            else:
                tf.add_to_collection(
                    tf.GraphKeys.UPDATE_OPS,
                    tf.assign_sub(average, (1 - decay) * (average - value)))
            averages.append(value)
    return tf.nn.batch_normalization(x, averages[0], averages[1], None, None,
                                     1e-3)


def main(_):
    tf.set_random_seed(0)
    images, labels = inputs()
    with slim.arg_scope(vgg.vgg_arg_scope(weight_decay=5e-4)), slim.arg_scope(
            [slim.conv2d],
            weights_initializer=tf.variance_scaling_initializer(2.0)):
        logits, _ = vgg.vgg_16(batch_norm(images), num_classes=10,
                               dropout_keep_prob=FLAGS.keep_prob)
    tf.losses.sparse_softmax_cross_entropy(labels, logits)
    loss = tf.losses.get_total_loss()

    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(1e-4, step, 2, 0.5, staircase=True)
    optimizer = accumgrad.AccumulatingOptimizer(
        tf.train.MomentumOptimizer(rate, 0.9), 4, reduction="mean")
    update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(update_ops):
        train_op = optimizer.minimize(loss, global_step=step)

    saver = tf.train.Saver()
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        checkpoint = tf.train.latest_checkpoint(FLAGS.train_dir)
        if checkpoint:
            saver.restore(sess, checkpoint)
        while sess.run(step) < FLAGS.max_steps:
            _, value = sess.run([train_op, loss])
            print("step %d: loss %.4f" % (sess.run(step), value))
        saver.save(sess, os.path.join(FLAGS.train_dir, "model"),
                   global_step=step)


if __name__ == "__main__":
    tf.app.run()
