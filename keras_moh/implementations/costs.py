"""The measured rule by which `implementation=None` chooses."""

from __future__ import annotations

from keras_moh.implementations.spec import AttentionSpec


def is_worth_it(name: str, spec: AttentionSpec) -> bool:
    """Whether the implementation is expected to be faster than those after it in the table."""
    return True


def skips_projections(spec: AttentionSpec) -> bool:
    """Whether projecting only the heads taken is expected to be faster than projecting all."""
    return True
