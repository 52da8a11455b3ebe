"""Says what to install where TensorFlow is missing or too old.

TensorFlow is no hard requirement of the package: machines with legacy code
have `tensorflow-gpu`, NVIDIA's or ROCm's build, and installing this library
must not put another one over it.  So the check comes at import.
"""

OLDEST_TENSORFLOW = (1, 14)


def check_tensorflow() -> None:
    """Raises ImportError unless TensorFlow 1.14 or newer can be imported."""
    try:
        import tensorflow
        version = tensorflow.__version__
    except (ImportError, AttributeError) as error:
        # AttributeError: a folder named "tensorflow" imports as an empty
        # namespace package.
        raise ImportError(
            "accumgrad needs TensorFlow 1.14 or newer, and none can be "
            "imported here.  Install the build that fits your machine, or "
            "`pip install accumgrad[tensorflow]` for the default one.  "
            f"(Importing it said: {error})") from error
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < OLDEST_TENSORFLOW:
        raise ImportError(
            "accumgrad needs TensorFlow 1.14 or newer, got "
            f"{version}.  Upgrade it; 1.15 runs code written for 1.x.")
