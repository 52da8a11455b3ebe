"""Optimizers as users write them."""

import tensorflow.compat.v1 as tf


def sgd(learning_rate=1.0):
    return tf.train.GradientDescentOptimizer(learning_rate)


class BertOptimizer(tf.train.Optimizer):
    """As legacy code has it: Adam without bias correction, weight decay.

    Ignores the global step, and makes its slots in apply_gradients.
    """

    def __init__(self, learning_rate, weight_decay=0.01):
        super().__init__(False, "AdamWeightDecayOptimizer")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, param in grads_and_vars:
            if grad is None or param is None:
                continue
            param_name = param.name[:-2]
            m = tf.get_variable(
                name=param_name + "/adam_m", shape=param.shape.as_list(),
                dtype=tf.float32, trainable=False,
                initializer=tf.zeros_initializer())
            v = tf.get_variable(
                name=param_name + "/adam_v", shape=param.shape.as_list(),
                dtype=tf.float32, trainable=False,
                initializer=tf.zeros_initializer())
            next_m = tf.multiply(0.9, m) + tf.multiply(1.0 - 0.9, grad)
            next_v = (tf.multiply(0.999, v)
                      + tf.multiply(1.0 - 0.999, tf.square(grad)))
            update = next_m / (tf.sqrt(next_v) + 1e-6)
            update += self.weight_decay * param
            assignments.extend([
                param.assign(param - self.learning_rate * update),
                m.assign(next_m), v.assign(next_v)])
        return tf.group(*assignments, name=name)


class AdamW(tf.train.AdamOptimizer):
    """As legacy code has it: decays each variable, then lets Adam update it.

    Loshchilov and Hutter, 2019: the decay is no part of the gradient.
    """

    def __init__(self, weight_decay, learning_rate):
        super().__init__(learning_rate, name="AdamW")
        self.weight_decay = weight_decay

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads_and_vars = list(grads_and_vars)
        # Not while the gradients are computed.
        with tf.control_dependencies([
                getattr(gradient, "values", gradient)
                for gradient, _ in grads_and_vars if gradient is not None]):
            decay_ops = [
                variable.assign_sub(self.weight_decay * variable.read_value())
                for gradient, variable in grads_and_vars
                if gradient is not None]
        with tf.control_dependencies(decay_ops):
            return super().apply_gradients(grads_and_vars, global_step, name)


class GivenPairs:
    """An optimizer-shaped object that has its gradients already."""

    def __init__(self, grads_and_vars):
        self._grads_and_vars = grads_and_vars
        self._optimizer = tf.train.GradientDescentOptimizer(1.0)

    def compute_gradients(self, loss, var_list=None):
        return self._grads_and_vars

    def apply_gradients(self, grads_and_vars, global_step=None):
        return self._optimizer.apply_gradients(grads_and_vars, global_step)
