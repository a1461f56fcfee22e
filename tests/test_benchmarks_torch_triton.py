"""The GPU's benchmarks on a CPU, where Triton interprets: right answers, never how fast they are.

Competitors that a CPU does not have are replaced by plain functions of the same arguments, so that
what the benchmark makes of them is tested all the same.
"""

import functools
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import keras
import pytest

from tests.conftest import is_installed

if keras.backend.backend() != "torch" or not is_installed("triton"):
    pytest.skip("of another backend, or without its extra", allow_module_level=True)

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from benchmarks import __main__ as main
from benchmarks.gpu import cases, command, competitors, report, suite, timing
from benchmarks.gpu.cases import FORWARD, TRAINING, Core
from benchmarks.gpu.competitors import (
    CUDNN,
    FLASH,
    FLEX,
    FLEX_ROWS,
    OF_ALL_HEADS,
    OF_HEADS_TAKEN,
    OURS,
    REFERENCE,
    VARLEN_ROWS,
)
from benchmarks.gpu.data import draw, expected, of_all_heads, some_tokens
from benchmarks.harness import WrongAnswerError
from tests import oracle

CPU = torch.device("cpu")
TINY = Core(19, batch=2, num_heads=4, groups=2, key_dim=16, active=2)
DECODING = replace(TINY, length=1, cache=600)
CASES = {
    "plain": TINY,
    "causal": replace(TINY, is_causal=True),
    "a key for each head": replace(TINY, groups=4, is_causal=True),
    "one key for all": replace(TINY, groups=1),
    "all heads": replace(TINY, active=4, is_causal=True),
    "decoding": DECODING,
    "float32": replace(TINY, dtype="float32", is_causal=True),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def scores_of(query: Any, key: Any) -> Any:
    return torch.einsum("...id,...jd->...ij", query, key) / math.sqrt(query.shape[-1])


def plain_flex(
    query: Any, key: Any, value: Any, block_mask: Any = None, enable_gqa: bool = False
) -> Any:
    """`flex_attention`, with gradients on a CPU too."""
    key, value = (
        x.repeat_interleave(query.shape[1] // x.shape[1], 1) if enable_gqa else x
        for x in (key, value)
    )
    scores = scores_of(query, key)
    if block_mask is not None:
        indices = (torch.arange(n) for n in scores.shape)
        seen = block_mask.mask_mod(*torch.meshgrid(*indices, indexing="ij"))
        scores = scores.masked_fill(~seen, -1e9)
        return scores.softmax(-1) * seen.any(-1, keepdim=True) @ value
    return scores.softmax(-1) @ value


def plain_varlen(
    query: Any, key: Any, value: Any, ends: Any, key_ends: Any, longest: int, key_length: int
) -> Any:
    """`varlen_attn`: the sequences one after the other."""
    counts, key_counts = ends.diff().tolist(), key_ends.diff().tolist()
    assert (max(counts), max(key_counts)) == (longest, key_length)
    lists = zip(*(query.split(counts), key.split(key_counts), value.split(key_counts)), strict=True)
    return torch.cat(
        [
            (
                scores_of(*(x.transpose(0, 1) for x in (q, k))).softmax(-1) @ v.transpose(0, 1)
            ).transpose(0, 1)
            for q, k, v in lists
        ]
    )


@pytest.fixture
def all_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competitors, "flex_attention", plain_flex)
    monkeypatch.setattr(competitors, "varlen_attn", plain_varlen)


# The oracle is checked by that of the package's own tests.
@each_case
def test_expected(case: Core) -> None:
    data = draw(case, CPU)
    tokens = some_tokens(case, 7, CPU)
    assert {0, case.length - 1} == {tokens[0].item(), tokens[-1].item()}
    sparse = torch.zeros_like(data.cotangent)
    sparse[:, tokens] = data.cotangent[:, tokens]
    arrays = [x.double().numpy() for x in (data.query, data.key, data.value)]
    gates = torch.zeros(data.query.shape[:3]).scatter(-1, data.heads.long(), data.gates)
    mask = torch.ones(case.length, case.key_length, dtype=torch.bool)
    mask = (mask.tril() if case.is_causal else mask).numpy()
    output, _ = oracle.attend(*arrays, mask)
    by = oracle.attend_gradients(*arrays, gates.double().numpy(), mask, sparse.double().numpy())
    by_query, by_key, by_value, by_gates = map(torch.as_tensor, by)
    wanted = (
        *((torch.as_tensor(output) * gates[..., None])[:, tokens], by_query[:, tokens]),
        *(by_key, by_value, by_gates.gather(-1, data.heads.long())[:, tokens]),
    )
    for x, y in zip(expected(case, data, tokens, gradients=True), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("all_serve")
@each_case
@pytest.mark.parametrize("name", [FLASH, FLEX, *OF_HEADS_TAKEN])  # cuDNN is on no CPU
def test_every_competitor_is_right(name: str, case: Core) -> None:
    """Output and all gradients, of all tokens and of some."""
    data = draw(case, CPU)
    data = of_all_heads(data) if name in OF_ALL_HEADS else data
    if name == VARLEN_ROWS and case.is_causal:
        with pytest.raises(competitors.UnavailableError, match="by the number of a row"):
            competitors.make(name, case, data)
        return
    program = competitors.make(name, case, data)
    for most in (5, 1000):
        suite.check(name, case, data, program, some_tokens(case, most, CPU))
    results = program.forward() if case.cache else program.training(program.own(data.cotangent))
    assert len(results) == 1 if case.cache else len(results) == 1 + len(program.leaves)


@pytest.mark.parametrize("case", [replace(TINY, is_causal=True), TINY, DECODING], ids=str)
@pytest.mark.parametrize("name", [FLEX, FLEX_ROWS])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_itself(name: str, case: Core) -> None:
    """Its outputs: on a CPU it has no gradients."""
    check_output(name, case)


def check_output(name: str, case: Core) -> None:
    data = draw(case, CPU)
    data = of_all_heads(data) if name == FLEX else data
    program = competitors.make(name, case, data)
    for leaf in program.leaves:
        leaf.requires_grad_(False)
    tokens = torch.arange(case.length)
    (wanted,) = expected(case, data, tokens, gradients=False)
    (output,) = program.answer(program.forward())
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=2e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_attention_is_compiled_once_for_all_lengths(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each kind of heads, and for a batch of one, with lengths known as whole blocks."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        query, key, value = (
            x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()
        )
        for x in (query, key, value):
            assert isinstance(x.shape[2], torch.SymInt)
            assert statically_known_true(x.shape[2] % 128 == 0)
            assert isinstance(x.shape[1], int)
            assert isinstance(x.shape[3], int)
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compiled = functools.cache(competitors._compiled_flex.__wrapped__)
    monkeypatch.setattr(competitors, "_flex_function", lambda *_: compiled())
    counts = []
    with torch._dynamo.config.patch(recompile_limit=8):  # and what it was after it
        for groups, length in itertools.product((2, 4), (256, 384, 768, 1536)):
            shape = {"length": length, "batch": 1536 // length, "groups": groups}
            check_output(FLEX, replace(TINY, **shape, is_causal=is_causal, dtype="float32"))
            counts.append(len(graphs))
    assert counts == [1, 1, 1, 2, 3, 3, 3, 4]


def test_flex_attention_serves_at_every_length() -> None:
    assert {case.length % competitors._FLEX_BLOCK for case in cases.cases() if not case.cache} == {
        0
    }


@pytest.mark.parametrize("number", range(5))
def test_every_number_is_checked(number: int) -> None:
    data = draw(TINY, CPU)
    program = competitors.make(REFERENCE, TINY, data)

    def wrong(results: list[Any]) -> list[Any]:
        results = list(results)
        results[number] = results[number] + 0.1 * results[number].abs().max()
        return results

    with pytest.raises(WrongAnswerError, match=f"reference .*: result {number} is off by"):
        suite.check(
            *(REFERENCE, TINY, data, replace(program, answer=wrong)), some_tokens(TINY, 5, CPU)
        )


def test_a_wrong_competitor_is_listed_and_wrong_kernels_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = competitors.make
    wrong: list[str] = [FLASH, REFERENCE]

    def made(name: str, case: Core, data: Any) -> Any:
        program = make(name, case, data)
        call = program.call
        return replace(program, call=lambda *x: (1.1 if name in wrong else 1) * call(*x))

    monkeypatch.setattr(competitors, "make", made)
    (record,) = suite.Suite(CPU, 1000).records([TINY])
    assert set(record["seconds"][TRAINING]) == {OURS}
    assert "result 0 is off by" in record["skipped"][FLASH]
    assert "result 0 is off by" in record["skipped"][REFERENCE]
    assert {CUDNN, FLEX, FLEX_ROWS, VARLEN_ROWS} < set(record["skipped"])
    assert all("\n" not in reason for reason in record["skipped"].values())
    wrong.append(OURS)
    with pytest.raises(WrongAnswerError, match=OURS):
        list(suite.Suite(CPU, 1000).records([TINY]))
    with pytest.raises(WrongAnswerError, match=OURS):
        suite.check_all([TINY], CPU)


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case is begun if the longest one before would still end in time."""
    now = [0.0]
    durations = {1: 5.0, 2: 20.0, 3: 1.0, 4: 1.0}

    def record(self: Any, case: Core) -> dict[str, Any]:
        now[0] += durations[case.length]
        return {"length": case.length}

    monkeypatch.setattr(suite.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(suite.Suite, "_record", record)
    measured = suite.Suite(CPU, limit=46)
    lengths = (1, 2, 3, 4, 1)
    records = list(measured.records([Core(length) for length in lengths]))
    assert [x["length"] for x in records] == [1, 2, 3, 4]
    assert measured.left_out == [Core(1)]


def test_attention_of_all_heads_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        *(suite, "measure"),
        lambda case, data, names, seconds: (
            measured.append((case.active, names)) or {FORWARD: {}, TRAINING: {}},
            {},
        ),
    )
    list(suite.Suite(CPU, 1000).records(replace(TINY, active=n) for n in (1, 2, 4)))
    assert [active for active, names in measured if names == OF_ALL_HEADS] == [4]
    assert [active for active, names in measured if names == OF_HEADS_TAKEN] == [1, 2, 4]


def test_cases_are_those_that_were_asked_for() -> None:
    found = list(cases.cases())
    assert len(found) == len(set(found))
    decoding = [case for case in found if case.cache]
    assert {(x.batch, x.length, x.cache, x.share) for x in decoding} == {(8, 1, 32768, 0.5)}
    others = [case for case in found if not case.cache]
    assert {x.length for x in others} == {256, 512, 1024, 2048, 4096, 8192, 16384}
    assert {round(x.share, 2) for x in others} == {0.25, 0.5, 0.75, 0.91, 1.0}
    kinds = {(x.num_heads, x.groups, x.key_dim, x.is_causal) for x in others}
    assert len(kinds) == 8
    assert len(others) == 7 * 5 * len(kinds)
    assert all(x.dtype == "bfloat16" and x.batch * x.length == 16384 for x in others)
    gate = list(cases.gate())
    assert {(x.num_heads, x.groups, x.key_dim, x.is_causal) for x in gate if not x.cache} >= kinds
    assert {(x.groups, x.key_dim) for x in gate if x.cache} == {
        (x.groups, x.key_dim) for x in decoding
    }


def bars(case: Core) -> dict[tuple[str, str], float | None]:
    found = {
        (measured, name): report.bar(case, measured, name)
        for measured in case.passes
        for name in (*OF_ALL_HEADS, REFERENCE)
    }
    return {key: wanted for key, wanted in found.items() if wanted is not None}


def test_cases_with_bars_come_first() -> None:
    """Time may not suffice for the last: only the first kind of heads has all lengths at once."""
    found = list(cases.cases())
    last = max(number for number, case in enumerate(found) if case.share == 0.5 and bars(case))
    others = [case for case in found[:last] if not bars(case)]
    assert {(case.key_dim, case.groups) for case in others} == {cases.HEADS[0]}


def test_bars() -> None:
    assert bars(Core(256)) == bars(Core(1024)) == bars(Core(4096, active=24)) == {}
    assert bars(Core(512)) == {(FORWARD, FLASH): 1.6, (FORWARD, FLEX): 1.6}
    long = {(FORWARD, FLASH): 1.85, (FORWARD, FLEX): 1.85, (FORWARD, CUDNN): 1.4}
    long |= {(TRAINING, FLASH): 1.7, (TRAINING, FLEX): 1.7, (TRAINING, CUDNN): 1.4}
    assert bars(Core(4096)) == bars(Core(16384)) == long
    all_heads = {(FORWARD, FLEX): 1 / 1.1, (TRAINING, FLEX): 1 / 1.1}
    assert bars(Core(512, active=32)) == bars(Core(4096, active=32)) == all_heads
    assert bars(Core(1, cache=32768)) == {(FORWARD, FLASH): 1.6}


def a_record(case: Core, **times: float) -> dict[str, Any]:
    """By hand: ours in 1 ms, the others in `times`."""
    names = {"flash": FLASH, "cudnn": CUDNN, "flex": FLEX}
    seconds = {OURS: [0.002, 0.001, 0.001]} | {names[x]: [y / 1e3] for x, y in times.items()}
    return {
        "case": vars(case),
        "seconds": dict.fromkeys(case.passes, seconds),
        "skipped": {VARLEN_ROWS: "it has none"},
    }


def test_tables() -> None:
    table = report.record_table(a_record(Core(4096, batch=4), flash=1.8, cudnn=1.5))
    header, _, *rows = table.splitlines()
    assert header.startswith("| N=4096, B=4, 32/32 heads, d=64, 50% active ")
    lines = ([x.strip() for x in row.split("|")[1:-1]] for row in rows if row.startswith("|"))
    cells = {name: others for name, *others in lines}
    assert cells[FLASH] == ["1.800", "1.80 (bar 1.85) ✗", "1.800", "1.80 (bar 1.70) ✓"]
    assert cells[CUDNN] == ["1.500", "1.50 (bar 1.40) ✓"] * 2
    assert cells[OURS] == ["1.000", "1.00"] * 2
    assert rows[-1] == "Skipped varlen_attn of rows: it has none"
    assert "paper reports 1.59" in report.record_table(a_record(Core(512, batch=32)))

    records = [a_record(Core(4096), flash=1.8), a_record(Core(1, cache=32768), flash=2.0)]
    lines = report.summary(records, [Core(256)]).splitlines()
    assert lines[0] == "2 of 3 bars reached; for 4 more the competitor has no time."
    assert [x.strip() for x in lines[3].split("|")[2:-1]] == [FORWARD, FLASH, "1.85", "1.80"]
    assert lines[-1] == "- N=256, B=1, 32/32 heads, d=64, 50% active"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_whole_command(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "cases", lambda: iter([TINY, DECODING]))
    monkeypatch.setattr(cases, "gate", lambda: iter([replace(TINY, dtype="float32")]))
    command.run(tmp_path / "new", device="cpu")
    result = json.loads((tmp_path / "new" / "gpu-torch.json").read_text())
    assert [Core(**record["case"]) for record in result["records"]] == [TINY, DECODING]
    assert set(result["machine"]) >= {"device", "versions", "commit"}
    assert set(result["machine"]["versions"]) >= {"torch", "triton", "keras"}
    assert result["left_out"] == []
    for record in result["records"]:
        for times in record["seconds"].values():
            assert {FLASH, OURS, REFERENCE} <= set(times)
            assert min(min(x) for x in times.values()) > 0
        measured = set(record["seconds"][FORWARD])
        assert measured | set(record["skipped"]) == {*OF_ALL_HEADS, *OF_HEADS_TAKEN}
    printed = capsys.readouterr().out
    assert "- N=19, B=2, 4/2 heads, d=16, 50% active, float32" in printed
    assert "of 1 bars reached" in printed
    (compared,) = result["bars"]
    assert (compared["case"], compared["over"]) == (str(DECODING), FLASH)
    assert "Left out for want of time: 0 cases." in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("it ran"))
    for patch, reason in (
        ((), "finds no GPU"),
        ((torch.cuda, "is_available", lambda: True), "of compute capability 8.0 or newer, not 7.5"),
        ((keras.backend, "backend", lambda: "jax"), "set KERAS_BACKEND=torch. Received: 'jax'"),
    ):
        if patch:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
            monkeypatch.setattr(*patch)
        with pytest.raises(SystemExit, match="2"):
            main.main(["--device=gpu"])
        assert reason in capsys.readouterr().err


def test_device_times() -> None:
    calls: list[int] = []
    (time,) = timing.device_times(lambda: calls.append(1), CPU, seconds=1)
    assert time > 0
    assert calls == [1]


def test_device_times_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is not there: what is enqueued, and what the time is taken of."""
    queue: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.place = len(queue)
            queue.append("event")

        def elapsed_time(self, end: "Event") -> float:
            assert queue[self.place : end.place + 1] == ["event", "run", "event"]
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: queue.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queue.append("sleep"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1))
    times = timing.device_times(lambda: queue.append("run"), torch.device("cuda"), seconds=0)
    assert times == [0.003] * 5
    once = ["sleep", "event", "run", "event"]
    assert queue == ["run", "synchronize", *5 * once, "synchronize"]
