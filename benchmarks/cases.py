"""What is measured: names, sizes and settings, as plain data.

TensorFlow is not imported here, nor by anything else in the process that
starts the others: on Linux the peak memory that a process is told begins with
what its parent held when it was started.
"""

from typing import NamedTuple

# In the order in which they take their turns.
CONTENDERS = ("recipe", "gradients", "dense", "auto")


class Case(NamedTuple):
    """One thing to measure.

    Attributes:
        title: What it is, with the sizes' names in braces.
        model: Name of the function in models.py that builds it.
        sizes: That function's arguments.
        quick_sizes: Those of them that `--quick` replaces.
        optimizer: A key of `models.OPTIMIZERS`.
        costly: Whether a cycle takes minutes.  Then only `auto` runs whole
            cycles; what a micro-batch costs the others does not depend on
            which of the cycle it is.
    """
    title: str
    model: str
    sizes: dict
    quick_sizes: dict
    optimizer: str
    costly: bool = False


_VGG16 = Case(
    "VGG-16 of the demo, triplets, {image_size} x {image_size}",
    "vgg16", {"image_size": 224}, {"image_size": 32}, "gradient descent",
    costly=True)
_EMBEDDING = Case(
    "embedding {num_rows} x {row_size}, {num_ids} ids a micro-batch",
    "embedding", {"num_rows": 1000000, "row_size": 64, "num_ids": 256},
    {"num_rows": 1000, "num_ids": 16}, "Adagrad")

CASES = {
    "vgg16": _VGG16,
    "vgg16-adam": _VGG16._replace(optimizer="Adam"),
    "vgg16-towers": _VGG16._replace(
        title="VGG-16 of the demo, three networks that share weights, "
        "{image_size} x {image_size}", model="vgg16_towers"),
    # fc6 is a convolution of 7 x 7 without padding: it takes 224 x 224.
    "slim": Case(
        "tf-slim's VGG-16, triplets, weight decay, dropout, 224 x 224",
        "slim", {}, {}, "gradient descent", costly=True),
    "slim-towers": Case(
        "tf-slim's VGG-16, triplets, weight decay, dropout, three networks "
        "that share weights, 224 x 224",
        "slim_towers", {}, {}, "gradient descent", costly=True),
    "embedding-adagrad": _EMBEDDING,
    "embedding-momentum": _EMBEDDING._replace(optimizer="Momentum"),
    "perceptron": Case(
        "perceptron 784-{hidden_size}-{hidden_size}-10, batch of one",
        "perceptron", {"hidden_size": 128}, {"hidden_size": 16},
        "gradient descent"),
    "transformer": Case(
        "transformer encoder layer, {width} wide ({inner_width} inside), "
        "{num_heads} heads, {length} positions",
        "transformer",
        {"width": 1024, "inner_width": 4096, "num_heads": 16, "length": 64},
        {"width": 32, "inner_width": 64, "num_heads": 2, "length": 8},
        "gradient descent"),
}

# With `--quick`, unless they are asked for: those without a small size are
# left out.
QUICK_CASES = tuple(name for name, case in CASES.items() if case.quick_sizes)

# To show that a micro-batch costs as much in a long cycle: by `auto`, in
# cycles of these numbers of micro-batches.
LONG_CASES = {
    "long-embedding": _EMBEDDING,
    "long-layer": Case(
        "dense layer {num_inputs} x {num_outputs}, batch of one",
        "layer", {"num_inputs": 2048, "num_outputs": 1024}, {},
        "gradient descent"),
}
LONG_LENGTHS = (10, 100, 1000, 10000)
QUICK_LENGTHS = (3, 30)
