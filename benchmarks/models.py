"""Builds the networks that are measured, in plain TensorFlow.

Each function builds into the default graph and returns a `Model`.
"""

from typing import Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from accumgrad import demo

OPTIMIZERS = {
    "gradient descent": lambda: tf.train.GradientDescentOptimizer(1e-3),
    "Adam": lambda: tf.train.AdamOptimizer(1e-4),
    "Adagrad": lambda: tf.train.AdagradOptimizer(1e-3),
    "Momentum": lambda: tf.train.MomentumOptimizer(1e-3, 0.9),
}

MARGIN = 0.1
# Of images: how many micro-batches differ before they come again.
NUM_TRIPLETS = 4


class Model(NamedTuple):
    """A network to train.

    Attributes:
        loss: Scalar float32 `Tensor`.
        make_feeds: Function of a number; returns a list of as many feed
            dicts, of arrays that are there before anything is measured.
    """
    loss: tf.Tensor
    make_feeds: Callable


def vgg16(image_size):
    """The demo's VGG-16: three images, a triplet, through one network."""
    model = demo.build_model(image_size, MARGIN)
    return Model(model.loss, _image_feeds(model.images))


def vgg16_towers(image_size):
    """The same, but a network for each image, and all share the weights."""
    images = tf.placeholder(tf.float32, [3, image_size, image_size, 3])
    with tf.variable_scope("towers", reuse=tf.AUTO_REUSE):
        towers = [demo.vgg16_embedding(image)
                  for image in tf.split(images, 3)]
    loss = demo.triplet_loss(*towers, margin=MARGIN)
    return Model(loss, _image_feeds(images))


def slim():
    """tf-slim's VGG-16, as legacy code has it, under the triplet loss.

    Its fully connected layers are convolutions, weight decay is in the
    gradients, and dropout is on.
    """
    return _slim(lambda images: tf.unstack(tf.reshape(
        _slim_embedding(images), [-1, 3, demo.EMBEDDING_SIZE]), axis=1))


def slim_towers():
    """The same, but a network for each image, and all share the weights."""
    def towers(images):
        with tf.variable_scope("towers", reuse=tf.AUTO_REUSE):
            return [_slim_embedding(image) for image in tf.split(images, 3)]
    return _slim(towers)


def _slim(embed_triplet):
    import tf_slim
    from tf_slim.nets import vgg

    size = vgg.vgg_16.default_image_size
    images = tf.placeholder(tf.float32, [3, size, size, 3])
    with tf_slim.arg_scope(vgg.vgg_arg_scope()):
        loss = demo.triplet_loss(*embed_triplet(images), margin=MARGIN)
    return Model(loss + tf.losses.get_regularization_loss(),
                 _image_feeds(images))


def _slim_embedding(images):
    from tf_slim.nets import vgg

    embeddings, _ = vgg.vgg_16(images, num_classes=demo.EMBEDDING_SIZE)
    return tf.nn.l2_normalize(embeddings, axis=1)


def embedding(num_rows, row_size, num_ids):
    """A table of which each micro-batch looks up some rows."""
    ids = tf.placeholder(tf.int32, [num_ids])
    # Not random: making it then takes no more memory than keeping it.
    table = tf.get_variable("table", [num_rows, row_size],
                            initializer=tf.ones_initializer())
    rows = tf.nn.embedding_lookup(table, ids)
    return Model(tf.reduce_mean(tf.square(rows)), _feeds(
        ids, lambda random: random.randint(num_rows, size=num_ids)))


def perceptron(hidden_size):
    """Three small layers: a micro-batch takes no time but the session's."""
    images = tf.placeholder(tf.float32, [None, 784])
    x = tf.nn.relu(_fully_connected(images, hidden_size, "hidden1"))
    x = tf.nn.relu(_fully_connected(x, hidden_size, "hidden2"))
    logits = _fully_connected(x, 10, "logits")
    labels = tf.zeros(tf.shape(images)[:1], tf.int32)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits))
    return Model(loss, _feeds(images, lambda random: random.rand(1, 784)))


def transformer(width, inner_width, num_heads, length):
    """One encoder layer (Vaswani et al., 2017), of one sequence at a time."""
    sequence = tf.placeholder(tf.float32, [length, width])
    attended = _fully_connected(
        _attention(sequence, num_heads), width, "output")
    x = _layer_norm(sequence + attended, "norm1")
    inner = tf.nn.relu(_fully_connected(x, inner_width, "inner"))
    y = _layer_norm(x + _fully_connected(inner, width, "outer"), "norm2")
    # Of half of it: the squares of the whole are always as large.
    return Model(tf.reduce_mean(tf.square(y[:, :width // 2])), _feeds(
        sequence, lambda random: random.randn(length, width)))


def layer(num_inputs, num_outputs):
    """A single fully connected layer."""
    inputs = tf.placeholder(tf.float32, [None, num_inputs])
    outputs = _fully_connected(inputs, num_outputs, "layer")
    return Model(tf.reduce_mean(tf.square(outputs)), _feeds(
        inputs, lambda random: random.rand(1, num_inputs)))


def _attention(x, num_heads):
    length, width = x.shape.as_list()

    def heads(name):
        projected = tf.reshape(_fully_connected(x, width, name),
                               [length, num_heads, width // num_heads])
        return tf.transpose(projected, [1, 0, 2])
    scores = tf.matmul(heads("query"), heads("key"), transpose_b=True)
    weights = tf.nn.softmax(scores / (width // num_heads) ** 0.5)
    mixed = tf.matmul(weights, heads("value"))
    return tf.reshape(tf.transpose(mixed, [1, 0, 2]), [length, width])


def _layer_norm(x, name):
    with tf.variable_scope(name):
        scale = tf.get_variable("scale", x.shape[-1:],
                                initializer=tf.ones_initializer())
        offset = tf.get_variable("offset", x.shape[-1:],
                                 initializer=tf.zeros_initializer())
        mean, variance = tf.nn.moments(x, axes=[-1], keep_dims=True)
        return (x - mean) * tf.rsqrt(variance + 1e-6) * scale + offset


def _fully_connected(x, units, name):
    with tf.variable_scope(name):
        weights = tf.get_variable("weights", [x.shape.as_list()[-1], units])
        biases = tf.get_variable("biases", [units],
                                 initializer=tf.zeros_initializer())
        return tf.nn.bias_add(tf.matmul(x, weights), biases)


def _feeds(placeholder, draw):
    """Returns a `make_feeds`, of arrays that `draw(random)` returns."""
    dtype = placeholder.dtype.as_numpy_dtype

    def make_feeds(number):
        random = np.random.RandomState(0)
        return [{placeholder: draw(random).astype(dtype)}
                for _ in range(number)]
    return make_feeds


def _image_feeds(images):
    shape = [3] + images.shape.as_list()[1:]
    make_triplets = _feeds(images, lambda random: random.randn(*shape))

    def make_feeds(number):
        triplets = make_triplets(min(number, NUM_TRIPLETS))
        return [triplets[i % NUM_TRIPLETS] for i in range(number)]
    return make_feeds
