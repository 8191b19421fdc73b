"""The server path of regeneration, against a stand-in that answers with a tiny model and fails at first."""

import copy
import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path

import pytest
import requests
from rich.console import Console

from drafttrain.data.chat import encode_prompt
from drafttrain.data.config import RegenerateConfig, ServerConfig, Source
from drafttrain.data.loss_mask import encode_conversation
from drafttrain.data.readers import read_conversations
from drafttrain.inference.decode import decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer
from drafttrain.regenerate.openai_client import _base_url, _message
from drafttrain.regenerate.stage import answer_conversations
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

N_CHATS = 9
HANG_S = 4.0
PASSING = ["429", "500", "garbage", "hang", "cut", "drop", "no choices", "bad ids", "no ids", "aborted"]


class StandIn(ThreadingHTTPServer):
    """Speaks the protocol for one target. Attributes may be changed by a test.

    Attributes:
        faults: what to do instead of answering, taken from the front; None answers.
        returns_ids: whether it understands `return_token_ids`: True, False, or "refuses" it with a 400.
        refuse: text; a prompt that holds it is refused with a 400.
        unknown: name of a parameter that is refused with a 400.
        bodies: what was posted.
    """

    daemon_threads = True

    def __init__(self, target: FrozenTarget, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.target, self.lock = target, threading.Lock()
        self.faults, self.bodies, self.models = [], [], ["tiny"]
        self.returns_ids, self.trims_stop, self.refuse, self.key = True, False, None, None
        self.unknown = None
        self.n_running = self.most_running = 0
        self.answer_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: dict, is_chat: bool) -> tuple[int, dict]:
        tokenizer = self.target.tokenizer
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if self.returns_ids == "refuses" and "return_token_ids" in body:
            return 400, {"error": {"message": "Unrecognized request argument: return_token_ids"}}
        if self.unknown in body:
            return 400, {"error": {"message": f"Unrecognized request argument: {self.unknown}"}}
        prompt = encode_prompt(tokenizer, body["messages"]) if is_chat else body["prompt"]
        if self.refuse and self.refuse in tokenizer.decode(prompt):
            return 400, {"error": {"message": "I will not answer that."}}
        sampling = SamplingParams(body["temperature"], body["top_p"], seed=body.get("seed", 0))
        with self.lock:
            rule = AcceptMatching([sampling])
            ((ids,), _) = decode_all(self.target, NoProposer(), [prompt], body["max_tokens"], accept=rule)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        choice = {"index": 0, "finish_reason": "stop" if ids[-1] in self.target.eos_token_ids else "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        answer = {"object": "completion", "model": body["model"], "choices": [choice]}
        if self.returns_ids is True and body.get("return_token_ids"):
            trimmed = self.trims_stop and choice["finish_reason"] == "stop"
            choice["token_ids"] = ids[:-1] if trimmed else ids
            (answer if is_chat else choice)["prompt_token_ids"] = prompt
        return 200, answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            fault = server.faults.pop(0) if server.faults else None
            server.n_running += 1
            server.most_running = max(server.most_running, server.n_running)
        try:
            self.reply(body, fault)
        except BrokenPipeError:
            pass
        finally:
            with server.lock:
                server.n_running -= 1

    def reply(self, body: dict, fault: str | None) -> None:
        server = self.server
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.send(401, {"error": {"message": "no key, no answer"}})
        time.sleep(server.answer_s)
        status, answer = server.answer(body, self.path == "/v1/chat/completions")
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self.send(404, {"detail": "Not Found"})
        if fault == "429":
            return self.send(429, {"error": "slow down"}, {"Retry-After": "0"})
        if fault == "500":
            return self.send(500, {"error": {"message": "engine trouble"}})
        if fault == "garbage":
            return self.send(200, b"<html>It works!</html>")
        if fault == "hang":
            time.sleep(HANG_S)
        if fault == "cut":
            return self.send(200, json.dumps(answer).encode()[:40], {"Content-Length": "5000"})
        if fault == "drop":
            self.close_connection = True
            return None
        if fault == "no choices":
            return self.send(200, {"choices": []})
        if fault == "bad ids":
            answer["choices"][0]["token_ids"] = [10**6]
        if fault == "no ids":
            answer["choices"][0]["token_ids"] = 7
        if fault == "aborted":
            answer["choices"][0]["finish_reason"] = "abort"
        return self.send(status, answer)

    def send(self, status: int, body: dict | bytes, headers: dict | None = None) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if headers and "Content-Length" in headers:
            self.close_connection = True


@contextmanager
def serving(server: StandIn):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def target(tiny_llama) -> FrozenTarget:
    """Ends some of its answers before the limit: the end-of-turn token is made likely."""
    model = copy.deepcopy(tiny_llama[0])
    model.get_output_embeddings().weight.data[tiny_llama[1].eos_token_id] *= 2.5
    return FrozenTarget(model, tiny_llama[1], "tiny")


@pytest.fixture
def server(target):
    with serving(StandIn(target)) as server:
        yield server


@pytest.fixture
def source(tmp_path) -> Path:
    questions = [[f"Question {n}: what is {n} times two?", "And then?"][: 1 + n % 2] for n in range(N_CHATS)]
    rows = [
        {"id": str(n), "conversations": [{"from": "human", "value": text} for text in texts]}
        for n, texts in enumerate(questions)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_for(source: Path, url: str | None, limits: dict | None = None, **server) -> RegenerateConfig:
    settings = {"retries": 9, "retry_wait_s": 0.01, "timeout_s": 30.0, "concurrency": 4} | server
    return RegenerateConfig(
        [Source(str(source))],
        max_new_tokens=12,
        max_prompt_tokens=200,
        temperature=1.0,
        server=ServerConfig(url, **settings) if url else None,
        **(limits or {}),
    )


def run(config: RegenerateConfig, out: Path, target: FrozenTarget, console: Console | None = None):
    local = target if config.server is None else None
    return answer_conversations(config, out, local, target.tokenizer, console=console or Console(quiet=True))


def rows_of(out: Path, name: str = "responses.jsonl") -> list[dict]:
    return [json.loads(line) for line in (out / name).read_text().split("\n") if line]


@pytest.fixture
def expected(target, source, tmp_path) -> bytes:
    run(config_for(source, None), tmp_path / "in process", target)
    whole = (tmp_path / "in process" / "responses.jsonl").read_bytes()
    assert {row["finish_reason"] for row in map(json.loads, whole.splitlines())} == {"stop", "length"}
    return whole


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_failing_server_gives_what_the_process_gives(target, server, source, tmp_path, expected, endpoint):
    """Greedy and sampled (the stand-in obeys seeds); every fault occurs, some on the same request."""
    server.faults = [None, *PASSING, None, *PASSING, *PASSING]
    every = {"retries": len(server.faults), "retry_wait_s": 0.0}  # on a busy machine one may get them all
    config = config_for(source, server.url, endpoint=endpoint, timeout_s=HANG_S - 1, **every)
    report = run(config, tmp_path / "out", target)
    assert (report.written, report.failed, report.retokenized) == (N_CHATS, 0, 0) and report.is_balanced
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == expected
    assert not server.faults and len(server.bodies) >= 1 + report.turns + 3 * len(PASSING)
    key = "prompt" if endpoint == "completions" else "messages"
    assert all(key in body and body["model"] == "tiny" for body in server.bodies)
    # not what a server would take from the model's generation config
    assert all(body["repetition_penalty"] == 1 and body["top_k"] == -1 for body in server.bodies)


@pytest.mark.parametrize("returns_ids", [False, "refuses"])
def test_without_token_ids_the_text_is_tokenized(target, server, source, tmp_path, expected, returns_ids):
    server.returns_ids = returns_ids
    console = Console(file=StringIO(), width=200)
    report = run(config_for(source, server.url, {"greedy_fraction": 1.0}), tmp_path / "out", target, console)
    assert report.retokenized == report.written == N_CHATS
    assert "top_k" in server.bodies[-1] and "refuses" not in console.file.getvalue()
    assert "returns no token ids" in console.file.getvalue()
    for row in rows_of(tmp_path / "out"):
        assert row["retokenized"] is True
        *others, last = [turn for turn in row["conversations"] if turn["from"] == "gpt"]
        for turn in [*others, last]:
            text = target.tokenizer.decode(turn["token_ids"], skip_special_tokens=True)
            assert text == turn["value"]
        stopped = last["token_ids"][-1:] == [target.tokenizer.eos_token_id]
        assert stopped == (row["finish_reason"] == "stop")
    for conversation in read_conversations(tmp_path / "out" / "responses.jsonl"):
        encode_conversation(target.tokenizer, conversation)


def test_a_server_without_further_parameters_is_named(target, server, source, tmp_path):
    server.unknown = "top_k"
    console = Console(file=StringIO(), width=200)
    report = run(config_for(source, server.url), tmp_path / "out", target, console)
    assert report.written == N_CHATS and report.retokenized == 0 and "top_k" not in server.bodies[-1]
    assert "the server refuses top_k, min_p and repetition_penalty" in console.file.getvalue()


def test_a_stop_token_that_the_server_leaves_out_is_put_back(target, server, source, tmp_path, expected):
    server.trims_stop = True
    assert run(config_for(source, server.url), tmp_path / "out", target).retokenized == 0
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == expected


def test_refused_requests_fail_and_can_be_tried_again(target, server, source, tmp_path, expected):
    server.refuse = "Question 3"
    config = config_for(source, server.url, {"max_failed": 0.5})
    report = run(config, tmp_path / "out", target)
    assert (report.read, report.written, report.failed) == (N_CHATS, N_CHATS - 1, 1) and report.is_balanced
    assert report.failures == {"HTTP 400: I will not answer that.": 1}
    (failure,) = rows_of(tmp_path / "out", "failed.jsonl")
    assert failure["id"] == "3" and failure["turn"] == 1 and failure["source"].endswith("chats.jsonl:row 4")
    posted = sum("Question 3" in target.tokenizer.decode(body["prompt"]) for body in server.bodies)
    assert posted == 1  # a refusal is not retried
    server.refuse = None
    assert run(config, tmp_path / "out", target).is_balanced
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == expected
    assert not (tmp_path / "out" / "failed.jsonl").exists()


def test_retries_run_out(target, server, source, tmp_path):
    server.faults = [None, *["500"] * 3, *["drop"] * 3]
    config = config_for(source, server.url, {"max_failed": 0.5}, retries=2, concurrency=1)
    report = run(config, tmp_path / "out", target)
    assert (report.written, report.failed) == (N_CHATS - 2, 2) and report.is_balanced
    reasons = Counter(row["reason"].split(":")[0] for row in rows_of(tmp_path / "out", "failed.jsonl"))
    assert reasons == {"HTTP 500": 1, "the connection was lost (ConnectionError)": 1}


def test_a_server_that_goes_away_loses_nothing(target, source, tmp_path, expected):
    console = Console(file=StringIO(), width=400)
    stand_in = StandIn(target)
    answer, n_answers = stand_in.answer, Counter()

    def and_die(body, is_chat):
        n_answers["all"] += 1
        if n_answers["all"] == 6:
            stand_in.socket.close()  # nobody else gets in
        if n_answers["all"] >= 6:
            raise BrokenPipeError
        return answer(body, is_chat)

    stand_in.answer = and_die
    with serving(stand_in):
        config = config_for(source, stand_in.url, retries=2, concurrency=2, timeout_s=3.0)
        with pytest.raises(UserError, match="cannot be reached") as error:
            run(config, tmp_path / "out", target, console)
    assert "\n" not in str(error.value) and "the same command goes on" in console.file.getvalue()
    kept = rows_of(tmp_path / "out", "responses.partial.jsonl")
    assert 0 < len(kept) < N_CHATS
    with serving(StandIn(target)) as second:
        report = run(config_for(source, second.url), tmp_path / "out", target)
        assert len(second.bodies) - 1 < report.turns
    assert report.written == N_CHATS and report.is_balanced
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == expected


def test_many_requests_are_under_way(target, server, source, tmp_path, expected):
    server.answer_s = 0.05
    run(config_for(source, server.url, concurrency=3, timeout_s=5.0), tmp_path / "out", target)
    assert server.most_running == 3
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == expected


def test_a_limit_does_not_wait_for_the_server(target, server, source, tmp_path):
    config = config_for(source, server.url, {"max_minutes": 0.01}, timeout_s=60.0)
    server.faults = [None]
    original = server.answer

    def slow(body, is_chat):
        if len(server.bodies) > 1:
            time.sleep(20)
        return original(body, is_chat)

    server.answer = slow
    begun = time.monotonic()
    report = run(config, tmp_path / "out", target)
    assert report.is_balanced and report.skipped["not reached before max_minutes"] > 0
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    "change, server_change, message",
    [
        ({}, {"key": "sesame"}, r"HTTP 401: no key, no answer; put the API key into \$OPENAI_API_KEY"),
        ({}, {"models": ["a", "b"]}, "regenerate.server.model: must be one of .*, got none; it lists a, b"),
        ({"model": "big"}, {}, "HTTP 404: The model `big` does not exist"),
        ({}, {"refuse": "Count"}, "HTTP 400: I will not answer that"),
        ({}, {"faults": ["garbage"] * 3}, "broken answer"),
        ({}, {"faults": ["500"] * 3}, "HTTP 500: engine trouble"),
        ({"concurrency": 0}, {}, "regenerate.server.concurrency: must be >= 1, got 0"),
    ],
)
def test_a_server_of_no_use(target, server, source, tmp_path, change, server_change, message):
    vars(server).update(server_change)
    with pytest.raises(UserError, match=message) as error:
        run(config_for(source, server.url, **change), tmp_path / "out", target)
    assert "\n" not in str(error.value)


def test_a_long_message_of_a_server_ends_at_a_word():
    response = requests.Response()
    response._content = json.dumps({"error": {"message": "impossible " * 60}}).encode()
    assert _message(response) == "impossible " * 26 + "impossible…"
    response._content = b"\n"
    assert _message(response) == "no message"


def test_no_server_at_all(target, source, tmp_path):
    with pytest.raises(UserError, match="http://127.0.0.1:9/v1: cannot be reached"):
        run(config_for(source, "http://127.0.0.1:9"), tmp_path / "out", target)
    with pytest.raises(UserError, match="regenerate.server.url: must be a URL such as"):
        run(config_for(source, "localhost:8000"), tmp_path / "out", target)
    with pytest.raises(UserError, match="regenerate.server.url: must be a URL such as"):
        run(config_for(source, "http://[::1:8000/v1"), tmp_path / "out", target)


def test_the_key_is_sent(target, server, source, tmp_path, expected, monkeypatch):
    server.key = "sesame"
    monkeypatch.setenv("MY_KEY", "sesame")
    run(config_for(source, server.url, key_variable="MY_KEY"), tmp_path / "out", target)
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == expected


def test_a_key_from_a_file_is_sent_without_its_line_end(target, server, source, tmp_path, monkeypatch):
    server.key = "sesame"
    monkeypatch.setenv("OPENAI_API_KEY", "sesame\n")
    assert run(config_for(source, server.url, model="tiny"), tmp_path / "out", target).written == N_CHATS


@pytest.mark.parametrize("key", ["open\nsesame", "\u201csesame\u201d"])
def test_a_key_that_no_header_can_hold_is_not_shown(target, server, source, tmp_path, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for model in (None, "tiny"):
        with pytest.raises(UserError, match=r"^\$OPENAI_API_KEY: must be .* on one line") as error:
            run(config_for(source, server.url, model=model), tmp_path / f"out {model}", target)
        assert "sesame" not in str(error.value)
    assert not server.bodies


def test_seeds_can_be_left_out(target, server, source, tmp_path):
    run(config_for(source, server.url), tmp_path / "a", target)
    assert any("seed" in body for body in server.bodies)
    server.bodies.clear()
    run(config_for(source, server.url, seeds=False), tmp_path / "b", target)
    assert server.bodies and not any("seed" in body for body in server.bodies)


def test_another_tokenizer_is_noticed(target, server, source, tmp_path):
    other = copy.deepcopy(target.tokenizer)
    decode = other.decode
    other.decode = lambda ids, **options: decode([token ^ 1 for token in ids], **options)
    server.target = FrozenTarget(target.model, other, "other")
    with pytest.raises(UserError, match="model tiny has another tokenizer than"):
        run(config_for(source, server.url), tmp_path / "out", target)


def test_another_chat_template_is_noticed(target, server, source, tmp_path):
    other = copy.deepcopy(target.tokenizer)
    other.chat_template = "Once upon a time. " + other.chat_template
    server.target = FrozenTarget(target.model, other, "other")
    console = Console(file=StringIO(), width=400)
    run(config_for(source, server.url, endpoint="chat"), tmp_path / "out", target, console)
    assert "renders a prompt differently" in console.file.getvalue()


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"]
)
def test_ways_to_write_the_url(url):
    assert _base_url(url) == "http://h:1/v1"
    assert _base_url("https://h/api/openai/v1") == "https://h/api/openai/v1"
