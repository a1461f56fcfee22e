"""The benchmarks' harness on tiny cases: what it checks and reports, never how fast anything is."""

import json
import sys
import types
from dataclasses import replace

import keras
import numpy as np
import pytest

from benchmarks import competitors, harness, machine, memory, report, suites, timing
from benchmarks.backends import load_backend
from benchmarks.cases import BARS, Case
from benchmarks.competitors import (
    CHOSEN,
    CONVERTED,
    CONVERTED_REFERENCE,
    DENSE,
    KERAS,
    REFERENCE,
)
from benchmarks.harness import WrongAnswerError
from benchmarks.roofline import ROOFLINE, make_program
from keras_moh.implementations import IMPLEMENTATIONS

TINY = Case(
    8, batch=2, features=12, num_heads=4, key_dim=3, num_shared_heads=1, top_k=1, is_causal=True
)
ALL = [KERAS, DENSE, REFERENCE, *competitors.implementations(), CHOSEN]


@pytest.fixture(autouse=True)
def small_gemm(monkeypatch):
    monkeypatch.setattr(harness, "GEMM_SIZE", 16)


def both(case):
    return [case, replace(case, training=True)]


def result_of(suite, records):
    return {
        "suite": suite,
        "backend": keras.backend.backend(),
        "machine": machine.describe(),
        "options": {"tokens": 4096},
        "records": records,
    }


@pytest.mark.parametrize("case", both(TINY), ids=str)
def test_measure(case):
    record = harness.measure(case, ALL, rounds=3, seconds=0)
    assert Case(**record["case"]) == case
    assert set(record["seconds"]) | set(record["skipped"]) == set(ALL)
    assert not {KERAS, DENSE, REFERENCE, CHOSEN} & set(record["skipped"])
    assert all(reason and "\n" not in reason for reason in record["skipped"].values())
    for by_mode in record["seconds"].values():
        assert tuple(by_mode) == load_backend().MODES
        assert all(len(times) == 3 and min(times) > 0 for times in by_mode.values())
    assert record["gemm_rate"] > 0
    assert record["flops"]["active"] < record["flops"]["dense"]
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("writes", [False, True])
def test_measure_a_step_of_decoding(writes, groups):
    case = replace(
        TINY, length=1, is_causal=False, cache=9, writes=writes, num_key_value_heads=groups
    )
    record = harness.measure(case, ALL, rounds=1, seconds=0)
    assert Case(**record["case"]) == case
    assert not {KERAS, DENSE, REFERENCE, CHOSEN} & set(record["skipped"])
    # Of the one token 4 projections, half of two of them saved; of 9 slots half of the attention.
    groups = groups or 4
    projections, core = 2 * 2 * 12 * 3 * (2 * 4 + 2 * groups), 2 * 2 * 9 * 4 * 6
    assert record["flops"]["dense"] == projections + core
    assert report.record_table(record)


def test_an_implementation_that_does_not_serve_is_skipped_with_its_reason(monkeypatch):
    module = types.ModuleType("never")
    module.unsupported_reason = lambda spec: f"no head of width {spec.key_dim}. Never"
    monkeypatch.setitem(sys.modules, "never", module)
    monkeypatch.setitem(IMPLEMENTATIONS, "never", (None, "never"))
    record = harness.measure(TINY, [KERAS, "never", CHOSEN], rounds=1, seconds=0)
    assert record["skipped"] == {"never": "no head of width 3. Never"}
    assert set(record["seconds"]) == {KERAS, CHOSEN}
    assert "Skipped never: no head of width 3. Never" in report.record_table(record)


@pytest.mark.parametrize("case", both(replace(TINY, router="query_norm")), ids=str)
def test_converted_attention_beside_the_original(case):
    names = [KERAS, CONVERTED_REFERENCE, CONVERTED]
    record = harness.measure(case, names, rounds=1, seconds=0)
    assert set(record["seconds"]) == set(names)
    with pytest.raises(WrongAnswerError, match=r"converted .*off by .* of 'converted, reference'"):
        harness.check(CONVERTED, case, [np.zeros(3)], [np.ones(3)])


def test_all_competitors_have_the_same_weights():
    weights = competitors.draw_weights(TINY)
    for name in ALL:
        for weight in competitors.build(name, TINY, weights).weights:
            path = weight.path.split("/", 1)[1]
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), weights[path])


def test_a_programs_gradients_are_by_tokens_and_all_weights():
    case = replace(TINY, training=True)
    for name in (KERAS, DENSE, REFERENCE, CHOSEN):
        layer = competitors.build(name, case, competitors.draw_weights(case))
        for mode in load_backend().MODES:
            answer = harness.answer(harness.program(name, mode, case, harness.draw(case)))
            shapes = [tuple(weight.shape) for weight in layer.trainable_weights]
            assert [x.shape for x in answer] == [(2, 8, 12), (2, 8, 12), *shapes]
            assert all(np.abs(x).max() > 0 for x in answer[:2])


def test_a_gradient_is_that_of_the_outputs_times_the_cotangents():
    x, weight = np.float32([[2, 3]]), keras.Variable(np.float32([[5], [7]]))
    for mode in load_backend().MODES:
        program = load_backend().training_step(
            lambda x: keras.ops.matmul(x, weight), [x], [weight], [np.float32([[11]])], mode
        )
        output, by_x, by_weight = harness.answer(program)
        np.testing.assert_array_equal(output, [[31]])
        np.testing.assert_array_equal(by_x, [[55, 77]])
        np.testing.assert_array_equal(by_weight, [[22], [33]])


@pytest.mark.parametrize("case", both(TINY), ids=str)
@pytest.mark.parametrize("name", [DENSE, CHOSEN])
def test_a_wrong_answer_is_refused_before_anything_is_timed(name, case, monkeypatch):
    right = competitors.build

    def wrong(built, case, weights):
        layer = right(built, case, weights)
        if built == name:
            layer.output_dense.kernel.assign(1.01 * layer.output_dense.kernel)
        return layer

    monkeypatch.setattr(competitors, "build", wrong)
    monkeypatch.setattr(harness, "alternate", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(WrongAnswerError, match=f"{name} .*is off by .*{competitors.oracle(name)}"):
        harness.measure(case, ALL, rounds=1, seconds=0)


@pytest.mark.parametrize("number", range(3))
def test_every_array_of_an_answer_is_checked(number):
    expected = [np.float32([1, -2]), np.float32([[3]]), np.float32([1e-3, 0])]
    harness.check(CHOSEN, TINY, expected, expected)
    for wrong in (np.float32(np.nan), np.float32(1.1) * expected[number] + np.float32(0.01)):
        received = list(expected)
        received[number] = np.broadcast_to(wrong, expected[number].shape)
        with pytest.raises(WrongAnswerError, match=f"result {number} of shape"):
            harness.check(CHOSEN, TINY, received, expected)
    with pytest.raises(ValueError, match="zip"):
        harness.check(CHOSEN, TINY, expected[:-1], expected)


def test_tokens_between_two_heads_are_drawn_again():
    case = replace(TINY, length=1000, num_heads=8, num_shared_heads=2, top_k=2, routing_groups=2)
    weights = {"router/routed_scores/kernel": np.random.default_rng(0).normal(size=(12, 6)) / 100}
    tokens = competitors.draw_tokens(case, weights)
    scores = tokens.astype("float64") @ weights["router/routed_scores/kernel"]
    ordered = np.sort(scores.reshape(2, 1000, 2, 3))
    assert (ordered[..., -1] - ordered[..., -2]).min() >= 1e-3


def test_programs_take_turns():
    calls = []
    times = timing.alternate({name: lambda name=name: calls.append(name) for name in "ab"}, 3)
    assert calls == list("aabb" * 3)
    assert {name: len(measured) for name, measured in times.items()} == {"a": 3, "b": 3}
    times = timing.alternate({"a": lambda: None}, rounds=1, seconds=0.01)
    assert len(times["a"]) > 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", both(replace(TINY, batch=1, length=16)), ids=str)
def test_roofline(case, causal):
    case = replace(case, is_causal=causal)
    others = {
        (ROOFLINE, mode): lambda case, data, mode=mode: make_program(mode, case, data)
        for mode in load_backend().MODES
    }
    record = harness.measure(case, [KERAS, CHOSEN], rounds=1, seconds=0, others=others)
    assert set(record["seconds"]) == {KERAS, CHOSEN, ROOFLINE}
    assert keras.backend.backend() in report.roofline([result_of("roofline", [record])])


def test_roofline_is_checked(monkeypatch):
    case = replace(TINY, batch=1, is_causal=False)
    attend = load_backend().bare_attention
    monkeypatch.setattr(load_backend(), "bare_attention", lambda *arrays: 1.01 * attend(*arrays))
    with pytest.raises(WrongAnswerError, match=ROOFLINE):
        make_program(load_backend().MODES[0], case, harness.draw(case))


@pytest.mark.parametrize("rows", [1, 255, 256, 600])
def test_bare_attention(rows):
    query, key, value = (
        np.random.default_rng(0).normal(size=(length, 4)).astype("float32")
        for length in (rows, 7, 7)
    )
    weights = np.exp(query @ key.T / 2)
    expected = weights / weights.sum(axis=1, keepdims=True) @ value
    for mode in load_backend().MODES:
        program = load_backend().forward(
            load_backend().bare_attention, [query, key, value], [], mode
        )
        np.testing.assert_allclose(harness.answer(program)[0], expected, atol=1e-5)


def test_memory_in_a_process_of_its_own():
    mode = load_backend().MODES[-1]
    measured = memory.measure_in_child(CHOSEN, mode, TINY, whole_check=False)
    assert measured["peak"] > measured["growth"] >= 0
    assert measured["seconds"] > 0


@pytest.mark.parametrize("whole_check", [False, True])
@pytest.mark.parametrize("name", [KERAS, CHOSEN])
def test_memory_is_of_a_right_answer(name, whole_check, monkeypatch):
    case = replace(TINY, training=whole_check)
    mode = load_backend().MODES[-1]
    assert memory.measure(name, mode, case, whole_check).keys() == {"peak", "growth", "seconds"}

    build = competitors.build

    def wrong(built, case, weights):
        layer = build(built, case, weights)
        if built == name:
            layer.output_dense.kernel.assign(1.01 * layer.output_dense.kernel)
        return layer

    if name != KERAS:  # which is its own oracle
        monkeypatch.setattr(competitors, "build", wrong)
        with pytest.raises(WrongAnswerError):
            memory.measure(name, mode, case, whole_check)


class Cases(suites.Options):
    """Options under which a suite yields its cases and competitors, and measures nothing."""

    def measure(self, case, names, others=None):
        return case, names

    def measure_doubted(self, case, names, is_doubtful):
        return case, names


def test_bars_measure_what_bars_are_about():
    for table in BARS.values():
        found = {(case.training, case.is_causal, case.length) for case, _ in suites.bars(Cases())}
        assert set(table) <= found
    for case, names in suites.bars(Cases(lengths=(8,))):
        assert names == ALL
        assert (case.length, case.features, case.num_heads, case.share) == (8, 768, 12, 0.5)


def test_grid_is_within_its_tokens():
    measured = list(suites.grid(Cases(tokens=1024)))
    assert {case.batch * case.length for case, _ in measured} >= {16, 1024}
    assert max(case.batch * case.length for case, _ in measured) == 1024
    shares = {case.share for case, names in measured if CHOSEN in names}
    assert shares == {0.25, 0.5, 0.75, 1.0}


@pytest.mark.parametrize("slower", [False, True])
def test_what_seems_slower_is_measured_again(slower, monkeypatch):
    measured = []

    def measure(case, names, rounds, seconds, others=None):
        measured.append((rounds, seconds))
        record = a_record()
        if slower:  # at first; a second look finds nothing
            record["seconds"][CHOSEN] = {"graph": [0.011 if len(measured) == 1 else 0.010]}
        return record

    monkeypatch.setattr(suites, "measure", measure)
    options = suites.Options(rounds=5, seconds=0.5)
    record = options.measure_doubted(Case(256), [REFERENCE, CHOSEN], report.is_slower)
    assert measured == [(5, 0.5), (15, 1.5)][: 1 + slower]
    assert not report.is_slower(record)


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_suite_has_a_summary(suite):
    assert suite in report.SUMMARIES


def a_record(**arguments):
    """A record by hand: plain attention in 8 ms, the reference in 10, the layer in 4 or 5."""
    return {
        "case": {**vars(Case(256)), **arguments},
        "flops": {"active": 2e9, "dense": 3e9},
        "gemm_rate": 1e12,
        "seconds": {
            KERAS: {"graph": [0.007, 0.008, 0.100]},
            DENSE: {"graph": [0.016]},
            REFERENCE: {"graph": [0.010]},
            CHOSEN: {"graph": [0.005], "jit": [0.003, 0.004, 0.005]},
        },
        "skipped": {"compact": "it has no groups"},
    }


def results_by_hand(suite="bars"):
    records = [a_record(), a_record(length=1024, is_causal=True), a_record(training=True)]
    result = result_of(suite, records)
    return {**result, "backend": "torch", "options": {"tokens": 4096}}


def test_table_of_a_record():
    lines = report.record_table(a_record()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:-2]]
    assert cells[0][0] == "forward, N=256, B=1, 50% of 12 heads"
    assert cells[0][1:] == ["ms", "speed-up", "active GFLOP", "GFLOP/s", "of GEMM"]
    assert cells[2][1:] == ["8.00", "1.00", "3.00", "375", "38%"]
    assert cells[-2][1:] == ["5.00", "1.60", "2.00", "400", "40%"]
    assert cells[-1] == ["implementation=None (jit)", "4.00", "2.00", "2.00", "500", "50%"]
    assert "GEMM: 1000 GFLOP/s. FLOP limit: 1.50." in lines[-2]
    assert lines[-1] == "Skipped compact: it has no groups"
    assert len({len(line) for line in lines[:-2]}) == 1


def test_summaries():
    bars = report.bars([results_by_hand()])
    assert "2.00 (bar 1.2) ✓" in bars
    assert "2.00 (bar 1.0) ✓" in bars
    assert "1024 causal" in bars
    grid = report.grid([results_by_hand("grid")])
    assert "0 of 3 cases" in grid
    plain = a_record()
    del plain["seconds"][REFERENCE], plain["seconds"][CHOSEN]
    grid = report.grid([{**results_by_hand("grid"), "records": [plain, a_record()]}])
    assert "1 of 2 cases" in grid
    assert "50% of 12 heads, plain |          2.00 |" in grid
    pair = a_record()
    pair["seconds"] = {name: pair["seconds"][name] for name in (DENSE, CHOSEN)}
    compact = report.compact([result_of("compact", [pair])])
    assert "router=None |     4.00 |       1.50 | 267% ✓" in compact
    converted = a_record()
    converted["seconds"] |= {CONVERTED_REFERENCE: {"jit": [0.010]}, CONVERTED: {"jit": [0.004]}}
    assert "0.80 |    2.00 ✓" in report.convert([result_of("convert", [converted])])
    megabytes = {KERAS: {"jit": {"growth": 2**30, "peak": 2**31, "seconds": 1.0}}}
    megabytes[CHOSEN] = {"jit": {"growth": 2**28, "peak": 13 * 2**30, "seconds": 2.0}}
    record = {"case": vars(Case(4096)), "memory": megabytes}
    assert "0.25 ✓" in report.memory([result_of("memory", [record])])
    assert "13.00 ✗" in report.long([result_of("long", [record])])


def test_docs_are_filled_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    text = "Before.\n\n<!-- benchmarks: {} -->\nold\n<!-- end -->\n\nAfter.\n"
    page.write_text(text.format("speed-ups") + text.format("long"))
    for _ in range(2):  # filling anew changes nothing
        report.fill(page, [results_by_hand()])
        filled = page.read_text()
        assert filled.count("Before.") == filled.count("After.") == 2
        assert "| torch " in filled
        assert filled.count("old") == 1  # there are no results of the other


def test_the_page_has_every_block():
    text = (machine.ROOT / "docs" / "how-fast.md").read_text()
    for name in report.DOCS_BLOCKS:
        assert text.count(f"<!-- benchmarks: {name} -->") == 1
    assert text.count("<!-- benchmarks: ") == text.count("<!-- end -->") == len(report.DOCS_BLOCKS)


def test_plots(tmp_path):
    from benchmarks import plots

    records = [a_record(), a_record(length=512), a_record(training=True, length=512)]
    records += [a_record(length=512, num_shared_heads=1, top_k=2)]
    paths = plots.draw([{**results_by_hand("curves"), "records": records}], tmp_path)
    assert [path.name for path in paths] == ["speed_length.svg", "speed_share.svg"]
    assert all(path.read_text().startswith("<?xml") for path in paths)


def test_command_line(tmp_path, monkeypatch, capsys):
    from benchmarks import __main__ as command

    def tiny_bars(options):
        assert options.lengths == (8, 16)
        for length in options.lengths:
            yield options.measure(replace(TINY, length=length), [KERAS, CHOSEN])

    monkeypatch.setitem(suites.SUITES, "bars", tiny_bars)
    command.main(["--lengths=8,16", "--rounds=2", "--seconds=0", f"--results={tmp_path / 'new'}"])
    backend = keras.backend.backend()
    result = json.loads((tmp_path / "new" / f"bars-{backend}.json").read_text())
    assert [record["case"]["length"] for record in result["records"]] == [8, 16]
    described = result["machine"]
    assert described["versions"]["keras"] == keras.__version__
    assert set(described) >= {"processor", "cores", "device", "commit", "python"}
    printed = capsys.readouterr().out
    assert "FLOP limit" in printed
    assert f"| {backend} " in printed
