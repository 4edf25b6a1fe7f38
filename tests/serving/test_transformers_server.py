"""transformers' own server with a drafter: every answer is that of plain `generate`, whoever asks at the same time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec import attach
from hf_specdec.cli import main
from hf_specdec.decoding.shared import SharedRounds
from hf_specdec.many_prompts import Ended
from hf_specdec.serving.transformers_server import BatchThread
from tests.method_table import make_ddtree
from tests.targets import make_target, tiny_tokenizer

TEMPLATE = (
    "{% if messages[0].content == '!' %}{{ raise_exception('no shouting') }}{% endif %}"
    "{% for each in messages %}{{ each.role[0] }}{{ each.content }}x{% endfor %}q"
)
NEW = 24


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32)


@pytest.fixture(scope="module")
def pair(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("pair")
    target.save_pretrained(folder / "target")
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    make_ddtree(target).save_pretrained(folder / "drafter")
    return [str(folder / "target"), str(folder / "drafter")]


@pytest.fixture(scope="module")
def client(pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An `openai` client of a running server."""
    openai = pytest.importorskip("openai")
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_specdec.cli", "serve", *pair, "--engine", "transformers", "--port", str(port),
               "--served-model-name", "pair"]  # fmt: skip
    server = subprocess.Popen(
        command,
        env=os.environ | {"HF_HOME": str(tmp_path_factory.mktemp("no") / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None, server.communicate()[1]
                time.sleep(0.1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
    finally:
        server.send_signal(signal.SIGINT)
        said = server.communicate(timeout=60)[1]
    assert said.splitlines()[-1] == "hf-specdec: stopped"
    assert "Traceback" not in said
    where = f"http://127.0.0.1:{port}/v1"
    assert f"Serving pair with {pair[1]} at {where}. Up to 32 requests at once share a batch." in said


def settings(pair: list[str], question: str, **others: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "pair", "messages": messages, "max_tokens": NEW, "temperature": 0, **others}


def plain(target: PreTrainedModel, question: str) -> str:
    inputs = tiny_tokenizer()(f"u{question}xq", return_tensors="pt")
    output = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return str(tiny_tokenizer().decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def streamed(client: Any, **arguments: Any) -> str:
    chunks = client.chat.completions.create(**arguments, stream=True)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_chats_and_completions_are_those_of_plain_generate(
    client: Any, pair: list[str], target: PreTrainedModel
) -> None:
    answer = client.chat.completions.create(**settings(pair, "hello"))
    assert answer.choices[0].message.content == plain(target, "hello")
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", NEW)
    assert streamed(client, **settings(pair, "hello")) == plain(target, "hello")
    text = client.completions.create(model="pair", prompt="uhelloxq", max_tokens=NEW, temperature=0)
    assert text.choices[0].text == plain(target, "hello")


def test_usage_counts_the_drafts_of_the_answer(client: Any, pair: list[str], target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    inputs = tiny_tokenizer()("uhelloxq", return_tensors="pt")
    target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    assert drafter.stats is not None
    accepted = drafter.stats.num_accepted_draft_tokens
    wanted = (accepted, drafter.stats.num_draft_tokens - accepted)
    assert sum(wanted) > 0

    def counts(usage: Any) -> tuple[int, int]:
        details = usage.completion_tokens_details
        return details.accepted_prediction_tokens, details.rejected_prediction_tokens

    assert counts(client.chat.completions.create(**settings(pair, "hello")).usage) == wanted
    text = {"model": "pair", "prompt": "uhelloxq", "max_tokens": NEW, "temperature": 0}
    assert counts(client.completions.create(**text).usage) == wanted
    for chunks in (
        client.chat.completions.create(**settings(pair, "hello"), stream=True),
        client.completions.create(**text, stream=True),
    ):
        assert [counts(chunk.usage) for chunk in chunks if chunk.usage] == [wanted]


def test_the_pair_stays_and_is_the_only_model(client: Any, pair: list[str], target: PreTrainedModel) -> None:
    assert [model.id for model in client.models.list()] == ["pair"]
    root = str(client.base_url).removesuffix("/v1/")
    audio = {"/v1/audio/transcriptions": b"model=x"}
    for path, body in {"/reset": b"", "/load_model": b'{"model": "."}', "/v1/systemone": b"{}", **audio}.items():
        request = urllib.request.Request(root + path, body, {"Content-Type": "text/plain", "Origin": "http://other"})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(request, timeout=60)
        assert f"serves pair with its drafter and nothing else: {path} is switched off" in refused.value.read().decode()
    loaded = urllib.request.Request(f"{root}/load_model", b'{"model": "pair"}', {"Content-Type": "application/json"})
    assert b'"ready"' in urllib.request.urlopen(loaded, timeout=60).read(), "as `transformers chat` asks"
    usage = client.chat.completions.create(**settings(pair, "hello")).usage
    assert usage.completion_tokens_details.rejected_prediction_tokens > 0, "it drafts"
    openai = sys.modules["openai"]
    with pytest.raises(openai.NotFoundError, match="The model 'other' does not exist: this server serves 'pair'"):
        client.chat.completions.create(**settings(pair, "hello", model="other"))


def test_what_cannot_be_answered_as_asked_is_a_400_with_the_reason(client: Any, pair: list[str]) -> None:
    openai = sys.modules["openai"]
    for changed, reason in (
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"max_tokens": -5}, "max_tokens=-5 must be a whole number of at least 1"),
        ({"n": 2}, "n=2 is not supported by this server: leave it out"),
        ({"temperature": -1}, "temperature=-1 must be a number between 0 and 100"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools are not supported: the chat template"),
        ({"messages": [{"role": "user", "content": "!"}]}, "refuses these messages: no shouting"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason) as raised:
            client.chat.completions.create(**settings(pair, "hello", **changed))
        assert raised.value.body["type"] == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match=reason):
            streamed(client, **settings(pair, "hello", **changed))
    with pytest.raises(openai.APIStatusError, match="Unexpected fields in the request: {'colour'}"):
        client.chat.completions.create(**settings(pair, "hello", extra_body={"colour": "red"}))
    with pytest.raises(openai.BadRequestError, match="prompt must be a text that is not empty"):
        client.completions.create(model="pair", prompt="")
    request = urllib.request.Request(f"{client.base_url}chat/completions", b"{", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=60)


def test_stop_strings_end_an_answer_inside_an_accepted_path(
    client: Any, pair: list[str], target: PreTrainedModel
) -> None:
    tokenizer, whole = tiny_tokenizer(), plain(target, "hello")
    stop = whole[6:8]
    inputs = tokenizer("uhelloxq", return_tensors="pt")
    ended = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    wanted = tokenizer.decode(ended[0, 8:], skip_special_tokens=True)
    assert len(wanted) < len(whole)
    assert client.chat.completions.create(**settings(pair, "hello", stop=[stop])).choices[0].message.content == wanted
    assert streamed(client, **settings(pair, "hello", stop=[stop])) == wanted


def test_several_at_once_and_clients_that_go_away(client: Any, pair: list[str], target: PreTrainedModel) -> None:
    questions = [f"{chr(97 + number % 26)}{'bcde'[number % 4]}" for number in range(32)]

    def ask(number: int) -> str:
        if number % 8 == 7:  # reads one piece and closes the connection
            stream = client.chat.completions.create(**settings(pair, questions[number]), stream=True)
            next(iter(stream))
            stream.close()
        if number % 2:
            return streamed(client, **settings(pair, questions[number]))
        answer = client.chat.completions.create(**settings(pair, questions[number]))
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(32)))
    assert answers == [plain(target, question) for question in questions]


def test_requests_at_once_share_rounds_and_keep_their_seeds(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, joined = make_ddtree(target), []
    join = SharedRounds.join

    def watched(self: SharedRounds, new: Any) -> None:
        join(self, new)
        joined.append(self.num_running)

    monkeypatch.setattr(SharedRounds, "join", watched)
    sampled = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    others = [{"input_ids": [5, 6 + number], "seed": number, **sampled} for number in range(3)]

    class First(BaseStreamer):
        """While this row is decoded, the other requests come."""

        def __init__(self) -> None:
            self.waiting: list[Future[Ended]] = []

        def put(self, value: torch.Tensor) -> None:
            if not self.waiting:
                self.waiting = [Future() for _ in others]
                for request in zip(self.waiting, others, strict=True):
                    rounds.requests.put(request)

        def end(self) -> None:
            """Nothing waits for it."""

    with attach(target, drafter):
        rounds, first = BatchThread(target, drafter), First()
        alone = [rounds.decoded(**request).result for request in others]
        assert not joined
        rounds.decoded(input_ids=[9, 8, 7], max_new_tokens=NEW, streamer=first, do_sample=False)
        together = [done.result(60).result for done in first.waiting]
    assert max(joined) == 4
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.skipif(os.name != "posix", reason="the message names the system's error")
def test_what_cannot_be_served_is_one_line(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        wrong = {
            f"No server can listen on 127.0.0.1:{port} (Address already in use)": [*pair, "--port", str(port)],
            "There is no folder './absent'": ["./absent", pair[1], "--port", "0"],
            "Are the two swapped?": [pair[1], pair[0], "--port", "0"],
            "--num-speculative-tokens 3 is for vLLM": [*pair, "--num-speculative-tokens", "3"],
        }
        for message, arguments in wrong.items():
            assert main(["serve", *arguments, "--engine", "transformers"]) == 1
            errors = capsys.readouterr().err.splitlines()
            assert len(errors) == 1
            assert message in errors[0]
    with pytest.raises(SystemExit):
        main(["serve", *pair, "--engine", "transformers", "--port", "99999"])
    assert "99999 must be a finite number of at least 0 and at most 65535" in capsys.readouterr().err


def test_a_drafter_that_is_missing_or_does_not_fit_is_one_line(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    make_ddtree(make_target("llama", "sdpa", torch.float32, hidden_size=48)).save_pretrained(tmp_path / "other")
    for drafter, message in (("./absent", "There is no folder './absent'"), (tmp_path / "other", "hidden_size")):
        assert main(["serve", pair[0], str(drafter), "--engine", "transformers", "--port", "0"]) == 1
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_missing_packages_are_named(pair: list[str], lacking: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lacking("fastapi")
    assert main(["serve", *pair, "--engine", "transformers", "--port", "0"]) == 1
    assert "needs the package fastapi, which is not installed: pip install 'transformers[serving]'" in (
        capsys.readouterr().err
    )
