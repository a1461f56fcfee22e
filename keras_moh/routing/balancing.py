r"""The two auxiliary losses of a router.

Load balancing (arXiv 2410.11842, "Load Balance Loss", with the factor of the authors' code), with
`E` candidates of which a token takes `k`:

$$ L_b = E \sum_{e=1}^{E} P_e f_e, $$

where $P_e$ is the mean probability of candidate `e` over the valid tokens and $f_e$ the fraction of
them that took it. Balanced routing gives `k`, collapse onto the same `k` heads gives `E`. The
choice is a constant for the gradient, which flows through $P_e$ alone.

Router z-loss (arXiv 2202.08906, eq. 5): the mean over valid tokens of
$(\log \sum_e \exp s_e)^2$, which keeps the scores `s` from growing.

Both are scalars in the dtype of their float input, and 0 if no token is valid.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_moh.shapes import same_shape


def _mean_over_tokens(values: Any, mask: Any) -> Any:
    """The mean of `values (..., N)` over the tokens where `mask (...)` holds; 0 without any."""
    leading = tuple(range(len(values.shape) - 1))
    if mask is None:
        weights = ops.ones_like(values[..., :1])
    else:
        weights = ops.cast(ops.expand_dims(mask, -1), values.dtype)
        # Chosen, not multiplied: a padded token may hold anything, infinities included.
        values = ops.where(ops.cast(weights, "bool"), values, ops.zeros_like(values))
    count = ops.sum(weights, axis=leading)
    return ops.sum(values, axis=leading) / ops.where(count > 0, count, ops.ones_like(count))


def load_balancing_loss(probabilities: Any, taken: Any, mask: Any = None) -> Any:
    """The load-balancing loss of one routing.

    Args:
        probabilities: `(..., E)`, float: the router's softmax over the candidates.
        taken: `(..., E)`, boolean: the candidates that each token took.
        mask: `(...)`, boolean, optional: the tokens that count. Defaults to all.

    Raises:
        ValueError: if the shapes differ.

    Returns:
        A scalar: `k` for balanced heads, up to `E` for collapsed ones, 0 without a valid token.

    Example:
    >>> import numpy as np, keras_moh
    >>> probabilities = np.full((1, 2, 4), 0.25, "float32")
    >>> taken = np.array([[[True, True, False, False], [False, False, True, True]]])
    >>> float(keras_moh.load_balancing_loss(probabilities, taken))
    2.0
    """
    probabilities, taken = ops.convert_to_tensor(probabilities), ops.convert_to_tensor(taken)
    if not same_shape(probabilities.shape, taken.shape):
        raise ValueError(
            "Arguments `probabilities` and `taken` must have the same shape. Received: "
            f"probabilities.shape={tuple(probabilities.shape)} and "
            f"taken.shape={tuple(taken.shape)}"
        )
    probability = _mean_over_tokens(probabilities, mask)
    fraction = _mean_over_tokens(ops.cast(taken, probabilities.dtype), mask)
    return probabilities.shape[-1] * ops.sum(probability * ops.stop_gradient(fraction))


def router_z_loss(scores: Any, mask: Any = None) -> Any:
    """The z-loss of a router's scores.

    Args:
        scores: `(..., E)`, float: the router's scores before the softmax.
        mask: `(...)`, boolean, optional: the tokens that count. Defaults to all.

    Returns:
        A scalar, 0 without a valid token.

    Example:
    >>> import numpy as np, keras_moh
    >>> round(float(keras_moh.router_z_loss(np.zeros((1, 3, 4), "float32"))), 4)
    1.9218
    """
    log_partition = ops.logsumexp(ops.convert_to_tensor(scores), axis=-1, keepdims=True)
    return ops.sum(_mean_over_tokens(ops.square(log_partition), mask))
