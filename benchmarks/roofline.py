"""The machine's limit for a case: what no implementation can leave out, and nothing else.

The same matrix products, gates and bare attention, on rows that were gathered beforehand: the
queries of each head are together already, and nothing is routed, sorted, masked or added up. A
causal row attends to the keys up to the last position of its tile. Of short sequences it is no
limit: there one product for all heads may take less time than a small one for each.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from benchmarks import competitors
from benchmarks.backends import load_backend
from benchmarks.cases import Case
from benchmarks.harness import Data, answer, check, program
from benchmarks.timing import Program

ROOFLINE = "roofline"
_CAUSAL_TILE_ROWS = 256


class _Block(NamedTuple):
    """Heads that the same tokens took: the shared ones together, each routed one by itself."""

    heads: np.ndarray
    rows: np.ndarray  # (n,): these tokens' positions, ascending
    gates: np.ndarray  # (n, heads)


def make_program(mode: str, case: Case, data: Data) -> Program:
    """The roofline's program, its output checked against the reference where it is the same."""
    if case.batch != 1:
        raise ValueError(f"The roofline is of one sequence. Received: batch={case.batch}")
    blocks = _blocks(case, data)
    inputs = _inputs(case, data, blocks)

    def call(tokens: Any, key: Any, value: Any, *rest: Any) -> list[Any]:
        groups = case.num_key_value_heads or case.num_heads
        keys = ops.split(ops.matmul(tokens, key), groups, axis=1)
        values = ops.split(ops.matmul(tokens, value), groups, axis=1)
        outputs = []
        for number, block in enumerate(blocks):
            gathered, query, gates, output = rest[4 * number : 4 * number + 4]
            queries = ops.split(ops.matmul(gathered, query), len(block.heads), axis=1)
            attended = [
                gates[:, column : column + 1]
                * _attend(
                    queries[column],
                    keys[head * groups // case.num_heads],
                    values[head * groups // case.num_heads],
                    block.rows,
                    case.is_causal,
                )
                for column, head in enumerate(block.heads)
            ]
            outputs.append(ops.matmul(ops.concatenate(attended, axis=1), output))
        return outputs

    if case.training:
        cotangents = [data.cotangents[0, block.rows] for block in blocks]
        made = load_backend().training_step(call, inputs, [], cotangents, mode)
    else:
        made = load_backend().forward(call, inputs, [], mode)
    if not case.is_causal:  # for that it would need the mask
        _check(case, data, blocks, made)
    return made


def _blocks(case: Case, data: Data) -> list[_Block]:
    router = competitors.build(competitors.CHOSEN, case, data.weights).router
    heads, gates, _ = (ops.convert_to_numpy(part)[0] for part in router(data.tokens))
    dense = np.zeros((case.length, case.num_heads), "float32")
    np.put_along_axis(dense, heads, gates, axis=1)
    taken = np.zeros_like(dense, dtype=bool)
    np.put_along_axis(taken, heads, True, axis=1)
    shared = np.flatnonzero(taken.all(axis=0))
    others = np.flatnonzero(taken.any(axis=0) & ~taken.all(axis=0))
    blocks = [_Block(shared, np.arange(case.length), dense[:, shared])] if len(shared) else []
    for head in others:
        rows = np.flatnonzero(taken[:, head])
        blocks.append(_Block(np.array([head]), rows, dense[rows, head, np.newaxis]))
    return blocks


def _inputs(case: Case, data: Data, blocks: list[_Block]) -> list[np.ndarray]:
    """The tokens, key and value kernels, and of each block its tokens, gates and kernels."""
    tokens, width = data.tokens[0], case.features
    query = data.weights["query/kernel"]
    output = data.weights["attention_output/kernel"]
    inputs = [
        tokens,
        data.weights["key/kernel"].reshape(width, -1),
        data.weights["value/kernel"].reshape(width, -1),
    ]
    for heads, rows, gates in blocks:
        inputs += [
            tokens[rows],
            query[:, heads].reshape(width, -1),
            gates,
            output[heads].reshape(-1, width),
        ]
    return inputs


def _attend(query: Any, key: Any, value: Any, rows: np.ndarray, is_causal: bool) -> Any:
    attend = load_backend().bare_attention
    if not is_causal:
        return attend(query, key, value)
    outputs = []
    for start in range(0, len(rows), _CAUSAL_TILE_ROWS):
        tile = slice(start, start + _CAUSAL_TILE_ROWS)
        reach = int(rows[tile][-1]) + 1
        outputs.append(attend(query[tile], key[:reach], value[:reach]))
    return ops.concatenate(outputs, axis=0)


def _check(case: Case, data: Data, blocks: list[_Block], made: Program) -> None:
    output = np.zeros_like(data.tokens)
    for block, part in zip(blocks, answer(made), strict=False):  # in training gradients follow
        output[0, block.rows] += part
    without_biases = {
        path: np.zeros_like(weight) if path.endswith("bias") else weight
        for path, weight in data.weights.items()
    }
    forward = dataclasses.replace(case, training=False)
    reference = program(
        competitors.REFERENCE,
        load_backend().MODES[0],
        forward,
        dataclasses.replace(data, weights=without_biases),
    )
    check(ROOFLINE, case, [output], answer(reference))
