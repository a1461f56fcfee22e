"""Tests that are known to fail, and why: what mends one takes its line out.

They are strict: one that passes fails the run.
"""

# (backend, pattern of the tests' names, reason)
KNOWN_BUGS: list[tuple[str, str, str]] = [
    (
        "tensorflow",
        r"test_(shapes\[reference-eager-no query\]|masks_of_nothing\[reference-eager-queries)",
        "TensorFlow's product of batches fails without rows, if it is called eagerly",
    ),
]
