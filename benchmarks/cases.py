"""What is computed: one layer of the transformer of the README's figures, and its variations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One computation: self-attention of `batch` sequences of `length` random tokens.

    Attributes:
        length: Tokens of a sequence, `N`.
        batch: Sequences, `B`.
        features: Width of the model, `D`.
        num_heads: Query heads, `H`.
        key_dim: Width of a head, `d`.
        num_shared_heads: Heads that every token takes.
        top_k: Routed heads that a token takes beside them.
        num_key_value_heads: Key/value heads, `G`; `None` for as many as query heads.
        routing_groups: Groups of heads in which a token takes equally many.
        is_causal: Whether a token attends only to those up to itself.
        training: Whether to compute output and all gradients, instead of the output alone.
        cache: Slots of a key/value cache to attend to, in place of the tokens; 0 for none.
        writes: Whether the tokens are written into the cache, as its last ones, under causality;
            else it is read alone.
        router: What chooses the heads.
    """

    length: int
    batch: int = 1
    features: int = 768
    num_heads: int = 12
    key_dim: int = 64
    num_shared_heads: int = 3
    top_k: int = 3
    num_key_value_heads: int | None = None
    routing_groups: int = 1
    is_causal: bool = False
    training: bool = False
    cache: int = 0
    writes: bool = False
    router: str = "two_stage"

    @property
    def share(self) -> float:
        """The share of the heads that a token takes."""
        return (self.num_shared_heads + self.top_k) / self.num_heads

    def __str__(self) -> str:
        return (
            f"{'training step' if self.training else 'forward'}, N={self.length}, B={self.batch}, "
            f"{self.share:.0%} of {self.num_heads} heads{', causal' if self.is_causal else ''}"
            f"{self._of_cache}"
        )

    @property
    def _of_cache(self) -> str:
        if not self.cache:
            return ""
        groups = self.num_key_value_heads or self.num_heads
        kind = "MHA" if groups == self.num_heads else f"GQA {groups}"
        return f", S={self.cache}, {kind}, {'written' if self.writes else 'read'}"


# Shared and routed heads of 12, by the share that is active.
HEADS_BY_SHARE = {0.25: (1, 2), 0.5: (3, 3), 0.75: (4, 5), 1.0: (6, 6)}

# The least speed-up over keras.layers.MultiHeadAttention that the project asks of its layer on two
# CPU cores, by backend and (training, causal, length).
BARS: dict[str, dict[tuple[bool, bool, int], float]] = {
    "torch": {
        (False, False, 256): 1.20,
        (False, False, 1024): 1.42,
        (False, False, 4096): 1.62,
        (False, True, 4096): 1.35,
        (True, False, 256): 1.0,
        (True, False, 1024): 1.2,
        (True, False, 4096): 1.45,
    },
    "jax": {
        (False, False, 256): 1.10,
        (False, False, 1024): 2.2,
        (False, False, 4096): 4.5,
        (False, True, 4096): 4.0,
        (True, False, 256): 1.0,
        (True, False, 1024): 2.0,
        (True, False, 4096): 4.0,
    },
    "tensorflow": {
        (False, False, 256): 1.05,
        (False, False, 1024): 1.45,
        (False, False, 4096): 2.3,
        (False, True, 4096): 1.8,
        (True, False, 256): 1.0,
        (True, False, 1024): 1.25,
        (True, False, 4096): 1.8,
    },
}
