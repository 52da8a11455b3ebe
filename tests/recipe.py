"""The recipe as people paste it, in plain TensorFlow: what to be equal to."""

import tensorflow.compat.v1 as tf


def build_recipe(loss, optimizer):
    """Returns the lists and the op that the recipe calls by these names."""
    variables = tf.trainable_variables()
    accumulators = [
        tf.Variable(tf.zeros(variable.shape, variable.dtype.base_dtype),
                    trainable=False, collections=["recipe"])
        for variable in variables]
    zero_ops = [accumulator.assign(tf.zeros_like(accumulator))
                for accumulator in accumulators]
    gradients = optimizer.compute_gradients(loss, variables)
    accum_ops = [accumulators[i].assign_add(gradient)
                 for i, (gradient, _) in enumerate(gradients)]
    train_op = optimizer.apply_gradients([
        (accumulators[i].read_value(), variable)
        for i, (_, variable) in enumerate(gradients)])
    return zero_ops, accum_ops, train_op


def initialize_recipe(session):
    session.run(tf.variables_initializer(tf.get_collection("recipe")))


OPTIMIZERS = {
    "GradientDescent": lambda: tf.train.GradientDescentOptimizer(0.1),
    "Momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "Adam": lambda: tf.train.AdamOptimizer(0.1),
    "Adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "RMSProp": lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.9),
    "Ftrl": lambda: tf.train.FtrlOptimizer(
        0.1, l1_regularization_strength=0.01),
    "Adadelta": lambda: tf.train.AdadeltaOptimizer(0.1),
    "ProximalAdagrad": lambda: tf.train.ProximalAdagradOptimizer(
        0.1, l1_regularization_strength=0.01),
}
