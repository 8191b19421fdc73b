"""A stand-in for the Hub: what `huggingface_hub` calls to publish and to download, over HTTP, in memory.

Commits are whole or absent, as on the Hub; large files are uploaded before and belong to no revision until a
commit names them. Metadata of a card are checked as far as names go. `fail` makes a step answer with an error
or break off, before or after its work.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

LARGE = (".safetensors", ".bin", ".png")  # uploaded apart, as .gitattributes asks for on the Hub
HUB_ID = re.compile(r"(?:[\w-]+/)?[\w.-]+")
STEPS = ("validate-yaml", "create", "info", "tree", "branch", "preupload", "batch", "put", "verify", "commit")


@dataclass
class Repo:
    """`commits`: the files of each commit by its id; `branches`: the id of the newest commit of each."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by sha256

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{branch}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class Hub:
    """The server. `tokens`: user and whether they may write, by token."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: dict[str, tuple[str, bool]] = {}
        self.calls: list[tuple[str, str]] = []  # step and address
        self.resolved: list[str] = []  # addresses of files that were asked for
        self.failures: dict[str, tuple[int, int]] = {}
        self.done = False
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        # an interval as short as a test: `close` waits for the end of one
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def fail(self, step: str, status: int, after: int = 0, done: bool = False) -> None:
        """From its `after`-th call on, a step answers with `status`; 0 breaks the connection off.

        Args:
            done: break it off when all is done: the answer gets lost.
        """
        assert step in STEPS
        self.failures[step] = (status, after)
        self.done = done

    def steps(self) -> list[str]:
        return [step for step, _ in self.calls]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which holds an answer's body back for 40 ms after its headers

    def log_message(self, *args) -> None:
        pass

    def do_POST(self):
        self.serve()

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        with self.hub.lock:
            self.route(path, body)

    def route(self, path: list[str], body: bytes) -> None:
        match path:
            case ["api", "validate-yaml"]:
                self.step("validate-yaml", lambda: self.validate(json.loads(body)["content"]))
            case ["api", "repos", "create"]:
                self.step("create", lambda: self.create(json.loads(body)))
            case ["api", "models", user, name]:
                self.step("info", lambda: self.info(f"{user}/{name}", "main"))
            case ["api", "models", user, name, "revision", *revision]:
                self.step("info", lambda: self.info(f"{user}/{name}", "/".join(revision)))
            case ["api", "models", user, name, "tree", revision, *_]:
                self.step("tree", lambda: self.tree(f"{user}/{name}", revision))
            case ["api", "models", user, name, "branch", branch]:
                self.step("branch", lambda: self.branch(f"{user}/{name}", branch))
            case ["api", "models", user, name, "preupload", revision]:
                self.step("preupload", lambda: self.preupload(f"{user}/{name}", revision, json.loads(body)))
            case [user, name, "info", "lfs", "objects", "batch"]:
                repo = f"{user}/{name.removesuffix('.git')}"
                self.step("batch", lambda: self.batch(repo, json.loads(body)))
            case ["large", user, name, "verify"]:
                self.step("verify", lambda: self.verify(f"{user}/{name}", json.loads(body)))
            case ["large", user, name, oid]:  # a signed address: no token
                self.step("put", lambda: self.put(f"{user}/{name}", oid, body), signed=True)
            case ["api", "models", user, name, "commit", revision]:
                lines = [json.loads(line) for line in body.splitlines()]
                self.step("commit", lambda: self.commit(f"{user}/{name}", revision, lines))
            case [user, name, "resolve", revision, *file]:
                self.hub.resolved.append(self.path)
                self.resolve(f"{user}/{name}", revision, "/".join(file))
            case _:
                self.error(404, "EntryNotFound")

    def step(self, name: str, do, signed: bool = False) -> None:
        self.hub.calls.append((name, self.path))
        status, after = self.hub.failures.get(name, (200, 0))
        if name in self.hub.failures and self.hub.steps().count(name) > after:
            if status:
                self.error(status)
            else:
                if self.hub.done:
                    self.answer = lambda value: None
                    do()
                self.close_connection = True
                self.connection.close()
        elif not signed and self.token() not in (None, *self.hub.tokens):
            self.error(401, message="Invalid credentials in Authorization header")
        else:
            do()

    def token(self) -> str | None:
        words = self.headers.get("Authorization", "").split()
        return words[1] if words else None

    def may_write(self, owner: str) -> bool:
        """Answers with an error if the caller may not."""
        user, writes = self.hub.tokens.get(self.token(), (None, False))
        if user is None:
            self.error(401, message="Invalid username or password.")
        elif not writes or user != owner:
            self.error(403, message="You don't have the rights")
        return bool(writes) and user == owner

    def found(self, repo: str) -> Repo | None:
        """A repository that the caller may see; answers with an error otherwise."""
        known = self.hub.repos.get(repo)
        if known is None or (
            known.private and self.hub.tokens.get(self.token(), ("",))[0] != repo.split("/")[0]
        ):
            self.error(404 if self.token() else 401, "RepoNotFound")
            return None
        return known

    def validate(self, card: str) -> None:
        data = yaml.safe_load(card.split("---\n")[1])
        names = {"base_model": [data["base_model"]], "datasets": data.get("datasets", [])}
        results = data.get("model-index", [{"results": []}])[0]["results"]
        names["model-index[0].results.dataset.type"] = [result["dataset"]["type"] for result in results]
        errors = [f'"{key}" with value "{name}" is not valid' for key in names for name in names[key]
                  if not HUB_ID.fullmatch(name)]  # fmt: skip
        if not re.fullmatch(r"[a-z0-9.-]+", str(data.get("license"))):
            errors.append('"license" must be one of [apache-2.0, mit, …]')
        found = {"errors": [{"message": error} for error in errors], "warnings": []}
        self.answer(found, 400 if errors else 200)

    def create(self, asked: dict) -> None:
        user = asked["organization"] or self.hub.tokens[self.token()][0]
        repo = f"{user}/{asked['name']}"
        if not self.may_write(user):
            return
        if repo in self.hub.repos:
            self.answer({"error": "exists", "url": f"{self.hub.url}/{repo}"}, 409)
            return
        self.hub.repos[repo] = Repo(asked.get("visibility") == "private" or asked.get("private", False))
        self.hub.repos[repo].commit("main", {".gitattributes": b"*.bin filter=lfs\n"})
        self.answer({"url": f"{self.hub.url}/{repo}"})

    def revision(self, known: Repo, revision: str) -> str | None:
        sha = known.branches.get(revision, revision)
        if sha not in known.commits:
            self.error(404, "RevisionNotFound")
            return None
        return sha

    def info(self, repo: str, revision: str) -> None:
        if (known := self.found(repo)) and (sha := self.revision(known, revision)):
            files = [{"rfilename": name} for name in known.commits[sha]]
            self.answer({"id": repo, "sha": sha, "private": known.private, "siblings": files, "tags": []})

    def tree(self, repo: str, revision: str) -> None:
        if (known := self.found(repo)) and (sha := self.revision(known, revision)):
            rows = []
            for name, content in known.commits[sha].items():
                row = {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
                if name.endswith(LARGE):
                    oid = hashlib.sha256(content).hexdigest()
                    row["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
                rows.append(row)
            self.answer(rows)

    def branch(self, repo: str, branch: str) -> None:
        if not self.may_write(repo.split("/")[0]):
            return
        branches = self.hub.repos[repo].branches
        if self.command == "DELETE":
            del branches[branch]
        elif branch in branches:
            return self.answer({"error": "exists"}, 409)
        else:
            branches[branch] = branches["main"]
        self.answer({})

    def preupload(self, repo: str, revision: str, asked: dict) -> None:
        if not self.may_write(repo.split("/")[0]):
            return
        if (known := self.found(repo)) and (sha := self.revision(known, revision)):
            there, rows = known.commits[sha], []
            for file in asked["files"]:
                row = {"path": file["path"], "shouldIgnore": False}
                row["uploadMode"] = "lfs" if file["path"].endswith(LARGE) else "regular"
                if row["uploadMode"] == "regular" and file["path"] in there:
                    row["oid"] = blob_id(there[file["path"]])
                rows.append(row)
            self.answer({"files": rows})

    def batch(self, repo: str, asked: dict) -> None:
        rows = []
        for wanted in asked["objects"]:
            row = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.repos[repo].large:
                place = f"{self.hub.url}/large/{repo}"
                row["actions"] = {
                    "upload": {"href": f"{place}/{wanted['oid']}"},
                    "verify": {"href": f"{place}/verify"},
                }
            rows.append(row)
        self.answer({"transfer": "basic", "objects": rows})

    def put(self, repo: str, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self.error(400)
        else:
            self.hub.repos[repo].large[oid] = body
            self.answer({})

    def verify(self, repo: str, asked: dict) -> None:
        content = self.hub.repos[repo].large.get(asked["oid"])
        self.answer({}) if content is not None and len(content) == asked["size"] else self.error(404)

    def commit(self, repo: str, revision: str, lines: list[dict]) -> None:
        if not self.may_write(repo.split("/")[0]):
            return
        if not (known := self.found(repo)) or not (sha := self.revision(known, revision)):
            return
        files = dict(known.commits[sha])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in known.large:
                    return self.error(400, message="a file of this commit was not uploaded")
                files[value["path"]] = known.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        new = known.commit(revision, files)
        self.answer({"commitOid": new, "commitUrl": f"{self.hub.url}/{repo}/commit/{new}"})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if not (known := self.found(repo)) or not (sha := self.revision(known, revision)):
            return
        if name not in known.commits[sha]:
            self.error(404, "EntryNotFound", commit=sha)
            return
        content = known.commits[sha][name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def answer(self, value, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(
        self, status: int, code: str | None = None, message: str = "", commit: str | None = None
    ) -> None:
        data = json.dumps({"error": message or code or "refused"}).encode()
        self.send_response(status)
        for header, value in (
            ("X-Error-Code", code),
            ("X-Error-Message", message),
            ("X-Repo-Commit", commit),
        ):
            if value:
                self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def blob_id(content: bytes) -> str:
    """Git's id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
