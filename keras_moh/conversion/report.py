"""What `convert_to_moh` did to a model, as a receipt."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ConvertedLayer:
    """One attention layer that was converted."""

    path: str
    """Its path in the model."""
    source: str
    """The name of the class that it was of."""
    num_heads: int
    """Query heads `H`."""
    num_key_value_heads: int
    """Key/value heads `G`."""
    num_shared_heads: int
    """Heads `H_s` that every token takes."""
    top_k: int
    """Heads `k` that a token takes beside them."""

    @property
    def num_active_heads(self) -> int:
        """Number of heads `K` that a token takes."""
        return self.num_shared_heads + self.top_k

    @property
    def active_share(self) -> float:
        """The share of the heads that a token takes, `K / H`."""
        return self.num_active_heads / self.num_heads


@dataclasses.dataclass(frozen=True)
class LeftLayer:
    """One attention layer that is as it was."""

    path: str
    """Its path in the model."""
    source: str
    """The name of its class."""
    reason: str
    """Why it was not converted."""


@dataclasses.dataclass(frozen=True)
class OutputChange:
    """How far the outputs move on a sample."""

    relative: float
    """The root mean square of the change by that of the outputs."""
    largest: float
    """The largest absolute change of a number."""


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What `convert_to_moh` did; readable when printed.

    Example:
    >>> import keras, keras_moh, numpy as np
    >>> x = keras.Input((5, 8))
    >>> attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=2, name="attention")
    >>> model = keras.Model(x, attention(x, x))
    >>> _, report = keras_moh.convert_to_moh(model, num_shared_heads=1, top_k=0.5)
    >>> print(report)
    1 attention layer converted to MoH, router 'query_norm', 75.0 % of the heads active
      attention  MultiHeadAttention  3 of 4 heads (1 shared + 2 routed)
    """

    router: str
    """The router of the converted layers."""
    converted: tuple[ConvertedLayer, ...]
    """The layers that were converted, in the model's order."""
    left: tuple[LeftLayer, ...]
    """The attention layers that were not, and why."""
    change: OutputChange | None = None
    """How far the outputs move on the `sample`, if there was one."""

    @property
    def active_share(self) -> float:
        """The share of all converted layers' heads that a token takes."""
        active = sum(layer.num_active_heads for layer in self.converted)
        return active / sum(layer.num_heads for layer in self.converted)

    def __str__(self) -> str:
        lines = [
            f"{_count(len(self.converted))} converted to MoH, router '{self.router}', "
            f"{self.active_share:.1%} of the heads active".replace("%", " %"),
            *_columns([_described(layer) for layer in self.converted]),
        ]
        if self.left:
            lines.append(f"{_count(len(self.left))} left as they were:")
            lines += _columns([(layer.path, layer.source, layer.reason) for layer in self.left])
        if self.change is not None:
            lines.append(
                f"On the sample the outputs move by {self.change.relative:.2%} (root mean square), "
                "a number by at most {0:.3g}".replace("%", " %").format(self.change.largest)
            )
        return "\n".join(lines)


def _count(layers: int) -> str:
    return f"{layers} attention layer{'' if layers == 1 else 's'}"


def _described(layer: ConvertedLayer) -> tuple[str, str, str]:
    groups = layer.num_key_value_heads
    shared = f" on {groups} key/value heads" if groups < layer.num_heads else ""
    return (
        layer.path,
        layer.source,
        f"{layer.num_active_heads} of {layer.num_heads} heads{shared} "
        f"({layer.num_shared_heads} shared + {layer.top_k} routed)",
    )


def _columns(rows: list[tuple[str, str, str]]) -> list[str]:
    path_width, source_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [
        f"  {path:{path_width}}  {source:{source_width}}  {text}" for path, source, text in rows
    ]
