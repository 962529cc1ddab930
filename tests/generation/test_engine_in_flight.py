"""An engine that samples while weights, requests and questions come in: in one process, against its own scores."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
from transformers import AutoTokenizer

from gdpo_nemo.generation import engine as engines
from gdpo_nemo.generation.requests import Completion, EngineReport, SampleRequest, Sampling
from gdpo_nemo.models.hf_folder import open_weights, weight_names
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.manifest import PeerLost, pack, unpack
from gdpo_nemo.weights.transports.base import Receiver
from gdpo_nemo.weights.transports.memory import MemoryReceiver

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=40)
SWITCH = 12
"""Decode steps before weights arrive in the tests that say when."""


class Weights:
    """Versions of the model's weights: even ones are the folder's, odd ones others."""

    def __init__(self, folder):
        read = open_weights(str(folder))
        self.tensors = {name: read(name) for name in weight_names(str(folder))}
        self.version = 0

    def packed(self, other: bool):
        """(manifest, buffer) of the next version of a kind."""
        self.version += 1 + (self.version + 1 + other) % 2
        factor = 1.7 if other else 1.0
        return pack(((name, tensor * factor) for name, tensor in self.tensors.items()), self.version)


@pytest.fixture(scope="session")
def weights(engine_model) -> Weights:
    return Weights(engine_model)


@pytest.fixture
def load(engine, weights):
    """Give the engine a kind of weights; returns their version. The engine starts and ends every test with the old."""

    def load(other: bool, kv: str = "drain") -> int:
        manifest, buffer = weights.packed(other)
        engine.prepare_update(manifest, kv)
        return engine.update_weights(manifest, MemoryReceiver(), buffer)

    load(False)
    yield load
    load(False)


def requests(count: int, length: int = 6, seed: int = 3) -> dict[str, tuple[SampleRequest, Sampling]]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2, 250, (count, length)).astype(np.int32)
    return {f"r{i}": (SampleRequest(prompt, 100 + i), SAMPLING) for i, prompt in enumerate(prompts)}


def collect(engine, count: int, done: Mapping[str, Completion] = MappingProxyType({})) -> dict[str, Completion]:
    """Poll until ``count`` requests are done, those of ``done`` included; each must come once."""
    found = dict(done)
    end = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count}"
        for name, completion in engine.poll(0.5).finished:
            assert name not in found
            found[name] = completion
    return found


def finished_before(engine, fits) -> tuple[dict[str, Completion], EngineReport]:
    """Poll until a report fits; returns what finished until then, and that report."""
    found: dict[str, Completion] = {}
    while True:
        report = engine.poll(0.01)
        found |= dict(report.finished)
        if fits(report):
            return found, report


@contextlib.contextmanager
def held_at(engine, steps: int, kv: str):
    """Ask for a hold during step number ``steps`` from now; yields the future of the hold."""
    core = engine._core
    step = core.step
    reached: Future[None] = Future()
    done = 0

    def counted():
        nonlocal done
        done += 1
        if done == steps:
            engine._enqueue(partial(engine._request_hold, kv, reached), [reached])
        return step()

    core.step = counted
    try:
        yield reached
    finally:
        core.step = step


def switched(engine, weights, wanted, kv: str, other: bool = True) -> dict[str, Completion]:
    """Draw requests; after ``SWITCH`` steps weights arrive."""
    manifest, buffer = weights.packed(other)
    with held_at(engine, SWITCH, kv) as reached:
        engine.submit(wanted)
        reached.result(300)
    engine.update_weights(manifest, MemoryReceiver(), buffer)
    return collect(engine, len(wanted))


def scored(engine, wanted, drawn) -> dict[str, np.ndarray]:
    """The log-probs that the engine's present weights give to the tokens of completions."""
    names = list(wanted)
    prompts = {name: request.prompt_ids for name, (request, _) in wanted.items()}
    scores = engine.score([np.concatenate([prompts[name], drawn[name].token_ids]) for name in names])
    return {name: score[len(prompts[name]) - 1 :] for name, score in zip(names, scores)}


def same(left: dict[str, Completion], right: dict[str, Completion]) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(left[name].token_ids, right[name].token_ids)
        and np.array_equal(left[name].logprobs, right[name].logprobs)
        for name in left
    )


def old_part(drawn: dict[str, Completion], version: int) -> dict[str, int]:
    """The tokens of each completion that were drawn before ``version``; some requests were still drawn at its arrival,
    and none was drawn by anything else."""
    for completion in drawn.values():
        assert sum(tokens for _, tokens in completion.spans) == len(completion.token_ids) == len(completion.logprobs)
        assert len(completion.spans) == 1 or completion.spans[1][0] == version
        assert len(completion.spans) < 3 and all(tokens > 0 for _, tokens in completion.spans)
    assert sum(len(completion.spans) == 2 for completion in drawn.values()) > len(drawn) / 2
    return {name: completion.spans[0][1] * (completion.version < version) for name, completion in drawn.items()}


def test_an_engine_on_a_cpu_does_not_import_vllm_again_to_inspect_its_model(engine, vllm_cache):
    """vLLM stores what it found in another process, which it starts for a class that it does not know."""
    assert not (vllm_cache / "modelinfos").exists()


def test_every_token_has_the_logprob_of_its_version_after_recompute(engine, weights, load):
    wanted = requests(6)
    drawn = switched(engine, weights, wanted, "recompute")
    cut = old_part(drawn, engine.version)
    assert max(cut.values()) == SWITCH
    by_new = scored(engine, wanted, drawn)
    load(False)
    by_old = scored(engine, wanted, drawn)
    assert max(np.abs(by_new[name] - by_old[name]).max() for name in wanted) > 0.1
    for name, completion in drawn.items():
        assert np.abs(completion.logprobs - by_old[name])[: cut[name]].max(initial=0) < 1e-4
        assert np.abs(completion.logprobs - by_new[name])[cut[name] :].max(initial=0) < 1e-4


def test_tokens_sampled_before_reused_keys_and_values_are_those_of_the_old_weights_bit_for_bit(engine, weights, load):
    wanted = requests(6)
    engine.submit(wanted)
    undisturbed = collect(engine, 6)
    drawn = switched(engine, weights, wanted, "keep")
    cut = old_part(drawn, engine.version)
    for name, completion in drawn.items():
        assert np.array_equal(completion.token_ids[: cut[name]], undisturbed[name].token_ids[: cut[name]])
        assert np.array_equal(completion.logprobs[: cut[name]], undisturbed[name].logprobs[: cut[name]])
    assert not same(drawn, undisturbed)
    by_new = scored(engine, wanted, drawn)
    off = [np.abs(completion.logprobs - by_new[name])[cut[name] :].max(initial=0) for name, completion in drawn.items()]
    assert max(off) > 1e-3  # otherwise the keys and values were computed again
    load(False)
    assert same(drawn, switched(engine, weights, wanted, "keep"))


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_equal_weights_that_arrive_in_flight_change_nothing(engine, weights, load, kv):
    wanted = requests(8)
    engine.submit(wanted)
    undisturbed = collect(engine, 8)
    drawn = switched(engine, weights, wanted, kv, other=False)
    old_part(drawn, engine.version)
    assert same(drawn, undisturbed)


def test_a_drained_engine_never_mixes_versions(engine, weights, load):
    wanted = requests(16)  # twice what it draws at a time
    before = engine.version
    drawn = switched(engine, weights, wanted, "drain")
    assert {completion.spans for completion in drawn.values()} == {
        ((before, len(completion.token_ids)),) for completion in drawn.values()
    }
    engine.submit(wanted)
    assert {completion.version for completion in collect(engine, 16).values()} == {engine.version}


@pytest.mark.parametrize("kv", ["drain", "recompute", "keep"])
def test_requests_during_a_hold_are_sampled_with_the_new_weights_only(engine, weights, load, kv):
    manifest, buffer = weights.packed(True)
    early, late = requests(4), {f"late {name}": asked for name, asked in requests(4, seed=8).items()}
    with held_at(engine, SWITCH, kv) as reached:
        engine.submit(early)
        reached.result(300)
    engine.submit(late)
    done, report = finished_before(engine, lambda report: report.waiting == 4)
    assert (report.running == 0) is (kv == "drain")
    engine.update_weights(manifest, MemoryReceiver(), buffer)
    drawn = collect(engine, 8, done)
    by_new = scored(engine, late, drawn)
    for name in late:
        assert drawn[name].spans == ((manifest.version, len(drawn[name].token_ids)),)
        assert np.abs(drawn[name].logprobs - by_new[name]).max() < 1e-4


@pytest.mark.parametrize("kv", ["drain", "recompute", "keep"])
def test_a_cached_prefix_is_never_that_of_older_weights(engine, weights, load, kv):
    """All requests share a long prompt; with ``keep`` it stays in use, and half of them have not begun yet."""
    prompt = requests(1, length=150)["r0"][0].prompt_ids
    wanted = {f"r{i}": (SampleRequest(prompt, i), SAMPLING) for i in range(16)}
    drawn = switched(engine, weights, wanted, kv)
    again = {f"again {name}": asked for name, asked in wanted.items()}
    engine.submit(again)
    drawn |= collect(engine, 16)
    new = {name: asked for name, asked in (wanted | again).items() if drawn[name].version == engine.version}
    assert len(new) >= (16 if kv == "drain" else 20)
    by_new = scored(engine, new, drawn)
    assert max(np.abs(drawn[name].logprobs - by_new[name]).max() for name in new) < 1e-4


def test_samples_of_a_prompt_compute_its_blocks_once_and_equal_single_samples(engine, load, monkeypatch):
    """A prompt of 70 tokens has two whole blocks of 32; of eight samples seven find them. Alone, a prompt is one
    product of 70 rows, behind found blocks one of 6: some processors round those differently."""
    found = {}
    finished = engines.completion_of
    monkeypatch.setattr(
        engines,
        "completion_of",
        lambda output: found.update({output.request_id: output.num_cached_tokens}) or finished(output),
    )
    prompt = requests(1, length=70, seed=5)["r0"][0].prompt_ids
    wanted = {f"r{i}": (SampleRequest(prompt, i), SAMPLING) for i in range(8)}
    engine.submit(wanted)
    together = collect(engine, 8)
    assert sorted(found.values()) == [0] + [64] * 7
    for name, asked in wanted.items():
        load(False)  # forgets the prefix
        engine.submit({name: asked})
        alone = collect(engine, 1)[name]
        assert np.array_equal(alone.token_ids, together[name].token_ids)
        np.testing.assert_allclose(alone.logprobs, together[name].logprobs, rtol=0, atol=1e-5)
    assert found.pop("r7") == 0


def test_partial_output_of_a_request_is_the_beginning_of_its_completion(engine, load):
    """Asked for at every boundary between two steps; another request is drawn beside it."""
    heard: list[list[int]] = []
    core = engine._core
    step = core.step

    def listened():
        outputs = step()
        heard.append(core.drawn("r0"))
        return outputs

    core.step = listened
    try:
        engine.submit(requests(2))
        drawn = collect(engine, 2)["r0"].token_ids.tolist()
    finally:
        core.step = step
    lengths = [len(tokens) for tokens in heard if tokens]
    assert lengths == sorted(lengths) and len(set(lengths)) >= len(drawn) - 2 > 2
    assert all(drawn[: len(tokens)] == tokens for tokens in heard)
    assert engine.drawn("r0") == engine.drawn("nobody's") == []


def test_scores_join_the_requests_in_flight(engine, load):
    """The sync check does not wait for the slowest sample, and does not change what is drawn."""
    wanted = requests(6)
    ids = np.arange(3, 60, dtype=np.int32)
    (alone,) = engine.score([ids])
    engine.submit(wanted)
    undisturbed = collect(engine, 6)
    engine.submit(wanted)
    (beside,) = engine.score([ids])
    done, report = finished_before(engine, lambda report: True)
    assert report.running > 0
    drawn = collect(engine, 6, done)
    assert alone.shape == (56,) and np.abs(alone - beside).max() < 1e-5
    assert all(np.array_equal(drawn[name].token_ids, undisturbed[name].token_ids) for name in wanted)


def test_a_hold_without_an_update_ends_and_nothing_is_lost(engine, weights, load):
    manifest, _ = weights.packed(True)
    wanted = requests(6)
    engine.submit(wanted)
    undisturbed = collect(engine, 6)
    with held_at(engine, SWITCH, "keep") as reached:
        engine.submit(wanted)
        reached.result(300)
    done, _ = finished_before(engine, lambda report: report.running > 0 and not report.finished)
    engine.submit({"held": requests(1)["r0"]})
    assert engine.poll(0.2).finished == []
    engine.resume()
    drawn = collect(engine, 7, done)
    drawn.pop("held")
    assert all(np.array_equal(drawn[name].token_ids, undisturbed[name].token_ids) for name in wanted)
    engine.resume()  # nothing to end


def test_a_hold_that_waits_for_idleness_can_be_called_off(engine, weights, load):
    manifest, _ = weights.packed(True)
    with held_at(engine, 2, "drain") as reached:
        engine.submit(requests(4))
        while not engine._holds:
            time.sleep(0.001)
        engine.resume()
        with pytest.raises(RunError, match="the engine resumed before it was idle"):
            reached.result(300)
    collect(engine, 4)


class BreaksOff(Receiver):
    """Its sender is lost halfway."""

    def opened(self, manifest, in_process, buffer):
        self.buffer = buffer
        return contextlib.nullcontext(self)

    def receive(self, manifest, device, worker):
        yield from list(unpack(manifest, self.buffer))[: len(manifest.entries) // 2]
        raise PeerLost("halfway")


@pytest.mark.parametrize("kv", ["drain", "recompute", "keep"])
def test_half_an_update_stops_the_engine_and_a_whole_one_heals_it(engine, weights, load, kv):
    manifest, buffer = weights.packed(True)
    wanted = requests(6)
    with held_at(engine, SWITCH, kv) as reached:
        engine.submit(wanted)
        reached.result(300)
    with pytest.raises(PeerLost, match="halfway"):
        engine.update_weights(manifest, BreaksOff(), buffer)
    for refused in (partial(engine.submit, requests(1)), partial(engine.score, [np.arange(3)]), engine.resume):
        with pytest.raises(RunError, match="it received only part of a weight update"):
            refused()
    done = dict(engine.poll(0).finished)
    assert engine.poll(0.2).finished == []
    engine.prepare_update(manifest, kv)
    engine.update_weights(manifest, MemoryReceiver(), buffer)
    drawn = collect(engine, 6, done)
    by_new = scored(engine, wanted, drawn)
    if kv == "recompute":
        for name, cut in old_part(drawn, manifest.version).items():
            assert np.abs(drawn[name].logprobs - by_new[name])[cut:].max(initial=0) < 1e-4
    engine.submit(wanted)
    assert {completion.version for completion in collect(engine, 6).values()} == {manifest.version}


def test_update_with_wrong_names_is_refused_and_the_engine_continues(engine, weights, load):
    manifest, _ = weights.packed(True)
    short = type(manifest)(manifest.version, manifest.entries[1:])
    engine.submit(requests(3))
    with pytest.raises(RunError, match="1 tensors missing"):
        engine.prepare_update(short, "keep")
    with pytest.raises(ValueError, match="must be one of drain, recompute, keep"):
        engine.prepare_update(manifest, "sometimes")
    collect(engine, 3)


def test_an_aborted_request_is_never_reported_and_leaves_no_trace(engine, load):
    long = {f"long {name}": asked for name, asked in requests(6, seed=5).items()}
    engine.submit(long)
    engine.abort(["long r0", "long r3", "nobody"])
    left = collect(engine, 4)
    assert set(left) == {"long r1", "long r2", "long r4", "long r5"}
    engine.submit(long)
    engine.abort(long)
    report = engine.poll(0.1)
    assert (report.finished, report.running, report.waiting, report.kv_used) == ([], 0, 0, 0.0)
    engine.submit(long)  # a dropped name may come again
    assert len(collect(engine, 6)) == 6


def grouped(lengths: list[int], group: int) -> dict[str, tuple[SampleRequest, Sampling]]:
    """Requests of one group that take this many decode steps."""
    asked = requests(len(lengths)).values()
    return {
        f"{group}-{i}": (replace(request, max_tokens=length, group=group), SAMPLING)
        for i, (length, (request, _)) in enumerate(zip(lengths, asked))
    }


def test_completions_of_a_group_are_reported_together_after_the_last(engine, load):
    engine.submit({**grouped([2, 30, 4], 7), **grouped([3], 8), **requests(1)})
    reports = []
    while sum(map(len, reports)) < 5:
        report = engine.poll(1.0)
        assert report.kept <= 2
        reports.append([done.name for done in report.finished])
    assert {"7-0", "7-1", "7-2"} <= set(next(names for names in reports if "7-1" in names))
    assert not {"8-0"} & set(next(names for names in reports if "7-1" in names)) and engine.poll(0).kept == 0


def test_completions_of_a_group_are_reported_if_its_last_request_is_aborted(engine, load):
    with held_at(engine, 6, "keep") as reached:
        engine.submit(grouped([2, 40, 4, 2, 40], 7))
        reached.result(300)
    assert (engine.poll(0).finished, engine.poll(0).kept) == ([], 3)
    engine.abort(["7-0", "7-1"])  # finished, but not reported; and unfinished
    assert (engine.poll(0).finished, engine.poll(0).kept) == ([], 2)
    engine.abort(["7-4"])
    assert set(collect(engine, 2)) == {"7-2", "7-3"} and engine.poll(0).kept == 0
    engine.resume()


def test_text_of_a_completion_is_decoded_only_if_requested(engine, engine_model, load):
    tokenizer = AutoTokenizer.from_pretrained(engine_model)
    asked = requests(3)
    asked["r1"] = (replace(asked["r1"][0], decodes=True), SAMPLING)
    engine.submit(asked)
    done = collect(engine, 3)
    assert done["r0"].text is None and done["r2"].text is None
    assert done["r1"].text == tokenizer.decode(done["r1"].token_ids, skip_special_tokens=True) != ""


def test_a_special_token_as_stop_string_ends_a_completion(engine, load):
    asked = requests(8)
    long = {name: (request, replace(SAMPLING, max_new_tokens=200)) for name, (request, _) in asked.items()}
    engine.submit(long)
    drawn = {name: done.token_ids.tolist() for name, done in collect(engine, 8).items()}
    (start,) = AutoTokenizer.from_pretrained(engine._core._llm.llm_engine.model_config.tokenizer)("<|start|>").input_ids
    stopping = {
        name: (request, replace(sampling, stop_strings=("<|start|>",)))
        for name, (request, sampling) in long.items()
        if start in drawn[name]
    }
    assert stopping
    engine.submit(stopping)
    for name, done in collect(engine, len(stopping)).items():
        assert done.token_ids.tolist() == drawn[name][: drawn[name].index(start) + 1]


def test_a_request_that_waits_for_an_update_can_be_aborted(engine, weights, load):
    manifest, buffer = weights.packed(True)
    engine.prepare_update(manifest)
    engine.submit(requests(2))
    engine.abort(["r0"])
    engine.update_weights(manifest, MemoryReceiver(), buffer)
    assert set(collect(engine, 1)) == {"r1"} and engine.poll(0.1).finished == []


def test_every_request_is_reported_once_despite_concurrent_calls(engine, weights, load):
    """Six threads submit, poll, abort and score while two updates of every kind arrive."""
    kept: set[str] = set()
    found: list[tuple[str, Completion]] = []
    over = threading.Event()

    def submit(worker: int) -> None:
        rng = random.Random(worker)
        for number in range(12):
            batch = requests(rng.randint(1, 4), seed=rng.randrange(99))
            named = {f"{worker}-{number}-{name}": asked for name, asked in batch.items()}
            engine.submit(named)
            if rng.random() < 0.3:
                gone = rng.choice(sorted(named))
                engine.abort([gone])  # it may have been reported already
                named.pop(gone)
            kept.update(named)
            time.sleep(rng.random() * 0.03)

    def poll() -> None:
        while not over.is_set():
            found.extend(engine.poll(0.05).finished)

    def update() -> None:
        for kv in ("drain", "recompute", "keep") * 2:
            load(True, kv)

    with ThreadPoolExecutor(6) as threads:
        pollers = [threads.submit(poll) for _ in range(2)]
        work = [threads.submit(submit, worker) for worker in range(2)]
        work += [threads.submit(update), threads.submit(lambda: [engine.score([np.arange(9)]) for _ in range(10)])]
        try:
            for future in work:
                future.result(300)
            end = time.monotonic() + 60
            while not kept <= {name for name, _ in found} and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            over.set()
        for future in pollers:
            future.result(300)
    names = [name for name, _ in found]
    assert len(names) == len(set(names)) and kept <= set(names)
    for _, completion in found:
        versions = [version for version, _ in completion.spans]
        assert versions == sorted(set(versions))
        assert sum(tokens for _, tokens in completion.spans) == len(completion.token_ids)


def test_counts_of_a_report_are_sums_over_the_engines_life(engine, weights, load):
    before = engine.poll(0)
    drawn = switched(engine, weights, requests(6), "recompute")
    after = engine.poll(0)
    tokens = sum(len(completion.token_ids) for completion in drawn.values())
    assert after.decoded_tokens - before.decoded_tokens == tokens and after.busy_s > before.busy_s
    thrown_away = sum(6 + SWITCH for completion in drawn.values() if len(completion.spans) == 2)
    assert after.recomputed_tokens - before.recomputed_tokens == thrown_away
    assert (after.running, after.waiting, after.kv_used, after.version) == (0, 0, 0.0, engine.version)


def test_blocking_call_equals_polling(engine, load):
    wanted = requests(6)
    engine.submit(wanted)
    polled = collect(engine, 6)
    batch = engine.generate([request for request, _ in wanted.values()], SAMPLING)
    assert same(polled, dict(zip(wanted, batch.completions))) and batch.version == engine.version
    assert engine.generate([], SAMPLING).completions == []


def test_prompt_that_cannot_be_continued_is_refused_and_others_continue(engine, load):
    engine.submit(requests(2))
    for length, reason in (
        (256, "a prompt has 256 tokens, which leaves no room in the context of 256"),
        (0, "must have at least one token"),
    ):
        with pytest.raises(RunError, match=reason):
            engine.submit({"long": (SampleRequest(np.full(length, 5, np.int32), 0), SAMPLING)})
    collect(engine, 2)


def test_a_sleeping_engine_refuses_and_samples_again_when_its_memory_is_back(engine, weights, load):
    wanted = requests(3)
    engine.submit(wanted)
    drawn = collect(engine, 3)
    engine.sleep()
    for what in ("weights", "kv_cache"):
        with pytest.raises(RunError, match="the engine cannot sample: it is asleep"):
            engine.submit(wanted)
        engine.wake(what)
        if what == "weights":
            load(False)
    engine.submit(wanted)
    assert same(drawn, collect(engine, 3))
