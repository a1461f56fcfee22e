"""The softmax over a last axis of any length."""

from __future__ import annotations

from typing import Any

from keras import ops


def softmax(scores: Any) -> Any:
    """The softmax over the last axis; over a single score too, of which `ops.softmax` warns.

    That is a common case here: one key in the first step of decoding, or one routed candidate.
    """
    if scores.shape[-1] == 1:
        return ops.exp(scores - scores)  # 1, and as for any other length a function of the score
    return ops.softmax(scores, axis=-1)
