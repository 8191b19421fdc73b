"""Client for servers with OpenAI's completions protocol: vLLM, SGLang, llama.cpp, hosted ones.

`OpenAIClient.generate` takes and yields what the engine in this process does (`engines.py`), with many
simultaneous requests. A small request before the work finds out whether the server returns token ids, which
the protocol does not require.
"""

import os
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import tokenize
from drafttrain.data.config import ServerConfig
from drafttrain.regenerate.dialogues import ChatRequest, Completion
from drafttrain.utils.errors import UserError, brief

CONNECT_TIMEOUT_S = 10.0
LONGEST_WAIT_S, LONGEST_ADVISED_S = 60.0, 600.0  # before a retry: our choice, and the server's
PROBE_RETRIES = 2
CHECK = "check regenerate.server (another endpoint? seeds: false?)"
WORTH_A_RETRY = (408, 409, 425, 429)  # and everything from 500 on


@dataclass
class Reply(Completion):
    """A completion from a server.

    Attributes:
        retokenized: the server returned no token ids; they were made from the text.
        error: why there is no reply; `finish_reason` is then "failed".
    """

    retokenized: bool = False
    error: str = ""


class _Broken(Exception):
    """Raised for an answer that does not follow the protocol."""


class _Failed(Exception):
    """Raised for a request without a reply. `status` is the last HTTP status, if there was one."""

    def __init__(self, reason: str, status: int | None):
        super().__init__(reason)
        self.status = status


class OpenAIClient:
    """Client of one model on one server, for one call of `generate`.

    Attributes:
        model: the model's name on the server.
        returns_ids: whether the server returns token ids; set by `probe`.
        extends: whether it accepts parameters that OpenAI's own API lacks; set by `probe`.
        notes: notes on this server for the user, a sentence each.
    """

    def __init__(self, config: ServerConfig, tokenizer: PreTrainedTokenizerBase, end_of_turn: list[int]):
        """
        Args:
            tokenizer: the target's, which must be the server's as well.
            end_of_turn: ids that end an answer; appended to replies that stopped by themselves but whose ids
                the server does not return, or returns without the stop token.

        Raises:
            UserError: no URL, or an API key that a header cannot hold.
        """
        self.config, self.tokenizer, self.end_of_turn = config, tokenizer, end_of_turn
        self.base_url = _base_url(config.url)
        self.model, self._key = config.model, _api_key(config.key_variable)
        self.returns_ids = self.extends = True
        self.notes: list[str] = []
        # all tokens that are not pieces of words: every token that can end an answer is among them
        self._markers = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._local = threading.local()
        self._closing = threading.Event()

    # before the work

    def probe(self, request: ChatRequest) -> None:
        """Find the model's name and the server's abilities, with a request of a few tokens.

        Args:
            request: asks for a few tokens, sampled if any of the work is.

        Raises:
            UserError: no such server or model, a missing key, a refusal, or another tokenizer than ours.
        """
        if self.model is None:
            self.model = self._only_model()
        try:
            for abilities in ((True, True), (False, True), (True, False), (False, False)):
                self.extends, self.returns_ids = abilities
                try:
                    answer, reply = self._exchange(request, PROBE_RETRIES)
                    break
                except _Failed as error:  # some servers refuse what they do not know
                    if error.status not in (400, 422) or not any(abilities):
                        raise
        except _Failed as error:
            raise UserError(f"{self.base_url}: {error}; {CHECK}") from None
        self.returns_ids = not reply.retokenized
        if reply.retokenized:
            self.notes.append("the server returns no token ids: replies are tokenized again from their text")
        if not self.extends:
            self.notes.append(
                "the server refuses top_k, min_p and repetition_penalty: those of its own config hold"
            )
        self._check_same_tokenizer(answer, request)

    def _only_model(self) -> str:
        try:
            response = self._session().get(f"{self.base_url}/models", timeout=(CONNECT_TIMEOUT_S, 60))
        except requests.RequestException as error:
            raise UserError(self._unreachable(error)) from None
        if response.status_code != 200:
            raise UserError(self._refusal(response))
        try:
            names = [model["id"] for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "no models"
            raise UserError(
                f"regenerate.server.model: must be one of the models of {self.base_url}, got none; it lists "
                f"{listed}"
            )
        return names[0]

    def _is_alive(self) -> bool:
        try:
            self._session().get(f"{self.base_url}/models", timeout=CONNECT_TIMEOUT_S)
        except requests.RequestException:
            return False
        return True

    def _check_same_tokenizer(self, answer: dict[str, Any], request: ChatRequest) -> None:
        choice = answer["choices"][0]
        ids, text = choice.get("token_ids"), choice.get("text")
        if self.returns_ids and text is not None:
            ours = self.tokenizer.decode(ids, skip_special_tokens=True)
            if ours.strip(" \n\ufffd") != text.strip(" \n\ufffd"):
                raise UserError(
                    f"{self.base_url}: model {self.model} has another tokenizer than "
                    f"{self.tokenizer.name_or_path} (its ids for {text!r} mean {ours!r}); serve the target"
                )
        prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if self.config.endpoint == "chat" and prompt_ids and prompt_ids != request.prompt_ids:
            self.notes.append(
                "the server's chat template renders a prompt differently from the tokenizer's, which "
                "training will use: prefer endpoint: completions"
            )

    # the work

    def generate(
        self, requests: Iterable[ChatRequest | None], on_step: Callable[[int], None] | None = None
    ) -> Iterator[Reply]:
        """Yield replies as they arrive; `requests` is read as by `decode_requests`.

        Args:
            on_step: called with the number of tokens of each reply, and at least once a second.

        Raises:
            UserError: the server cannot be reached any more, or refuses the key or the model.
        """
        asked: queue.SimpleQueue = queue.SimpleQueue()
        answered: queue.SimpleQueue = queue.SimpleQueue()
        waiting, n_threads, exhausted = 0, 0, False
        requests = iter(requests)
        try:
            while True:
                while not exhausted and waiting < self.config.concurrency:
                    try:
                        request = next(requests)
                    except StopIteration:
                        exhausted = True
                        break
                    if request is None:
                        break
                    if waiting == n_threads:
                        n_threads += 1
                        # daemons: a hanging request must not keep the process from ending
                        threading.Thread(target=self._work, args=(asked, answered), daemon=True).start()
                    asked.put(request)
                    waiting += 1
                if not waiting:
                    return
                try:
                    reply = answered.get(timeout=1.0)
                except queue.Empty:
                    reply = None
                if isinstance(reply, BaseException):
                    raise reply
                if on_step:
                    on_step(len(reply.token_ids) if reply else 0)
                if reply:
                    waiting -= 1
                    yield reply
        finally:
            self._closing.set()
            for _ in range(n_threads):
                asked.put(None)

    def _work(self, asked: queue.SimpleQueue, answered: queue.SimpleQueue) -> None:
        while (request := asked.get()) is not None and not self._closing.is_set():
            try:
                answered.put(self.ask(request))
            except BaseException as error:  # noqa: BLE001 - the thread that waits for the reply raises it
                answered.put(error)

    def ask(self, request: ChatRequest) -> Reply:
        """Send one request until it is answered, refused, or out of retries.

        Raises:
            UserError: no request can succeed: the server cannot be reached, or refuses the key or the model.
        """
        try:
            return self._exchange(request, self.config.retries)[1]
        except _Failed as error:
            return Reply(request.id, [], "failed", error=str(error))

    def _exchange(self, request: ChatRequest, retries: int) -> tuple[dict[str, Any], Reply]:
        """Post a request until there is an answer; return it raw, and as a reply."""
        path = "completions" if self.config.endpoint == "completions" else "chat/completions"
        url, timeout = f"{self.base_url}/{path}", (CONNECT_TIMEOUT_S, self.config.timeout_s)
        body, wait = self._body(request), self.config.retry_wait_s
        for attempt in range(retries + 1):
            status, advised, lost = None, None, None
            try:
                response = self._session().post(url, json=body, timeout=timeout)
                status = response.status_code
                if status == 200:
                    answer = response.json()
                    return answer, self._read(answer, request)
                reason = f"HTTP {status}: {_message(response)}"
                if status in (401, 403, 404):
                    raise UserError(self._refusal(response))
                if status not in WORTH_A_RETRY and status < 500:
                    break
                advised = _seconds(response.headers.get("Retry-After"))
            except requests.ReadTimeout:
                reason = f"no answer within {self.config.timeout_s:g} s"
            except (ValueError, _Broken) as error:  # ValueError: not JSON
                reason = f"broken answer: {brief(error)}"
            except requests.RequestException as error:
                reason, lost = f"the connection was lost ({type(error).__name__})", error
            if attempt < retries:
                # half of the wait is random, so that requests that failed together are not repeated together
                own = min(wait * random.uniform(0.5, 1.0), LONGEST_WAIT_S)
                self._closing.wait(own if advised is None else min(advised, LONGEST_ADVISED_S))
                wait *= 2
            if self._closing.is_set():
                break
        if lost is not None and not self._is_alive():  # a server that is alive hangs up on this request only
            raise UserError(self._unreachable(lost))
        raise _Failed(reason, status)

    # the protocol

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_new_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
        }
        if self.config.endpoint == "completions":
            body["prompt"] = request.prompt_ids
        else:
            body["messages"] = [{"role": m.role, "content": m.content} for m in request.messages]
        if self.config.seeds and request.sampling.temperature > 0:
            body["seed"] = request.sampling.seed
        if self.returns_ids:
            body["return_token_ids"] = True
        if self.extends:
            # vLLM would take them from the model's generation_config.json, and penalize repetition
            body |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        return body

    def _read(self, answer: Any, request: ChatRequest) -> Reply:
        """Return an answer as a reply; raise `_Broken` if it is not one."""
        try:
            choice = answer["choices"][0]
            text = choice["text"] if self.config.endpoint == "completions" else choice["message"]["content"]
            finish = choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise _Broken(f"no reply in it ({type(error).__name__} {error})") from None
        if finish not in ("stop", "length"):
            raise _Broken(f"finish_reason {finish!r}")
        ids = choice.get("token_ids")
        retokenized = not ids
        if retokenized:
            if not isinstance(text, str):
                raise _Broken(f"a {type(text).__name__} in place of text")
            ids = tokenize(self.tokenizer, text)
        elif not isinstance(ids, list):
            raise _Broken(f"a {type(ids).__name__} in place of token ids")
        elif not all(isinstance(token, int) and 0 <= token < len(self.tokenizer) for token in ids):
            raise _Broken("token ids outside the target's vocabulary")
        if finish == "stop" and (not ids or ids[-1] not in self._markers):
            ids = ids + self.end_of_turn
        return Reply(request.id, ids, finish, retokenized)

    def _session(self) -> requests.Session:
        """Return this thread's session: a `Session` is not to be shared."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            if self._key:
                self._local.session.headers["Authorization"] = f"Bearer {self._key}"
        return self._local.session

    def _refusal(self, response: requests.Response) -> str:
        remedy = {
            401: f"put the API key into ${self.config.key_variable}",
            403: f"put an API key that may use this model into ${self.config.key_variable}",
            404: "check regenerate.server.url, .model and .endpoint",
        }.get(response.status_code, CHECK)
        return f"{response.url} answers HTTP {response.status_code}: {_message(response)}; {remedy}"

    def _unreachable(self, error: requests.RequestException) -> str:
        return (
            f"{self.base_url}: cannot be reached ({type(error).__name__}); start the server, or check "
            "regenerate.server.url"
        )


def _api_key(variable: str) -> str:
    """Return the API key in an environment variable, without space around it; "" if it is not set."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):  # `requests` would show it in its error
        raise UserError(
            f"${variable}: must be ASCII characters on one line, got others; put the API key alone into it"
        )
    return key


def _base_url(url: str) -> str:
    """Return `http://host/v1` for `http://host`, `http://host/v1/` and `http://host/v1/chat/completions`."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not close
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"regenerate.server.url: must be a URL such as http://localhost:8000/v1, got {url!r}")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions"):
        path = path.removesuffix(ending)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _message(response: requests.Response) -> str:
    """Return the server's own message, in one short line."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return brief(text, 300) or "no message"


def _seconds(header: str | None) -> float | None:
    try:
        return float(header)
    except (TypeError, ValueError):  # absent, or a date
        return None
