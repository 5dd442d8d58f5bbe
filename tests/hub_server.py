"""A Hugging Face Hub on the loopback interface, enough for the real huggingface_hub client to publish and to load.

    with HubServer(tokens={"good": "org"}) as hub:
        subprocess.run([...], env={**os.environ, **hub.environment(home)})

It keeps repositories in memory: commits (path → bytes), branches and tags. ``hub.die_at = "PUT"`` closes the connection
in the middle of the next such request, and of every later one, as a dying server does, until ``hub.die_at = None``; a
client in another process sets it by ``POST /test/die/PUT`` and ``POST /test/die/never``. After
``POST /test/busy/commit/503/7/2`` the next two requests with ``commit`` in their path are answered 503 with the header
``Retry-After: 7``.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit id → path → contents
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag → commit id
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)}{message}".encode()).hexdigest()
        self.commits[oid] = files
        self.refs[branch] = oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        oid = self.refs.get(revision, revision)
        return oid if oid in self.commits else None


class HubServer:
    """Runs in a thread of this process; ``tokens`` maps each valid token to the namespace it may write to."""

    def __init__(self, tokens: dict[str, str]):
        self.tokens = tokens
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}  # sha256 → contents
        self.requests: list[tuple[str, str]] = []
        self.die_at: str | None = None
        self.busy: list[str] = []  # a part of the path, a status, a Retry-After, and how many times
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environment(self, home, token: str | None = None) -> dict[str, str]:
        env = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": token or "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return env | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


def _handler(hub: HubServer):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                parts = []
                while size := int(self.rfile.readline().strip(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, status: int, data=b"", **headers):
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", headers.pop("Content_Length", str(len(body))))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _refuse(self, status: int, code: str, message: str):
            self._answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

        @property
        def _owner(self) -> str | None:
            return hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

        def _repo(self, name: str) -> Repo | None:
            """The repository, or None after an answer: without access a private one is not there."""
            repo = hub.repos.get(name)
            if repo is None or (repo.private and self._owner != name.partition("/")[0]):
                self._refuse(404 if self._owner else 401, "RepoNotFound", "Repository not found")
                return None
            return repo

        def _route(self):
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            if hub.die_at and not path.startswith("/test/") and (self.command == hub.die_at or hub.die_at in path):
                self.rfile.read(min(1000, int(self.headers.get("Content-Length") or 0)))  # some of it, then nothing
                self.close_connection = True
                self.connection.close()
                return
            if self._is_busy(path):
                return
            for pattern, action in ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    action(self, **match.groupdict())
                    return
            self._refuse(404, "EntryNotFound", f"no such route: {self.command} {path}")

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _route

        def _is_busy(self, path: str) -> bool:
            """A busy server does not look at what it is sent."""
            if not hub.busy or path.startswith("/test/") or hub.busy[0] not in path:
                return False
            at, status, after, times = hub.busy
            hub.busy = [at, status, after, str(int(times) - 1)] if int(times) > 1 else []
            self._body()
            headers = {} if after == "none" else {"Retry_After": after}
            self._answer(int(status), {"error": "busy"}, **headers)
            return True

        def be_busy(self, what):
            self._body()
            hub.busy = what.split("/")
            self._answer(200)

        def die(self, at):
            self._body()
            hub.die_at = None if at == "never" else at
            self._answer(200)

        # ---- repositories

        def whoami(self):
            owner = self._owner
            self._answer(200, {"name": owner, "type": "user"}) if owner else self._refuse(401, "", "Invalid token")

        def create(self):
            asked = json.loads(self._body())
            if self._owner is None:
                return self._refuse(401, "", "Invalid username or password.")
            owner = asked.get("organization") or self._owner
            if owner != self._owner:
                return self._refuse(403, "", f"You don't have the rights to create a model under {owner}")
            name = f"{owner}/{asked['name']}"
            if name in hub.repos:
                return self._answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            hub.repos[name] = Repo(private)
            hub.repos[name].commit("main", {".gitattributes": b""}, "initial commit")
            self._answer(200, {"url": f"{hub.url}/{name}", "name": name, "id": name})

        def branch(self, repo, branch):
            self._body()
            if (found := self._repo(repo)) and branch in found.refs:
                self._answer(409, {"error": "exists"})
            elif found:
                found.refs[branch] = found.refs["main"]
                self._answer(200, {})

        def tag(self, repo, revision):
            name = json.loads(self._body())["tag"]
            if (found := self._repo(repo)) and name in found.refs:
                self._answer(409, {"error": "Tag already exists"})
            elif found:
                found.refs[name] = found.resolve(revision)
                self._answer(200, {})

        def info(self, repo, revision="main"):
            if found := self._repo(repo):
                if (oid := found.resolve(revision)) is None:
                    return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                siblings = [{"rfilename": path} for path in sorted(found.commits[oid])]
                self._answer(200, {"id": repo, "sha": oid, "private": found.private, "siblings": siblings})

        def tree(self, repo, revision):
            if found := self._repo(repo):
                if (oid := found.resolve(revision)) is None:
                    return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                files = found.commits[oid].items()
                oids = {path: hashlib.sha1(data).hexdigest() for path, data in files}
                self._answer(200, [{"type": "file", "path": p, "size": len(d), "oid": oids[p]} for p, d in files])

        def list_models(self):
            names = [
                name for name, repo in hub.repos.items() if not repo.private or self._owner == name.partition("/")[0]
            ]
            self._answer(200, [{"id": name, "modelId": name, "private": hub.repos[name].private} for name in names])

        # ---- uploads

        def validate_yaml(self):
            valid = json.loads(self._body())["content"].startswith("---\n")
            self._answer(
                200 if valid else 400, {"errors": [] if valid else [{"message": "no metadata"}], "warnings": []}
            )

        def preupload(self, repo, revision):
            asked = json.loads(self._body())["files"]
            if self._repo(repo):
                modes = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in asked}
                self._answer(
                    200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
                )

        def batch(self, repo):
            asked = json.loads(self._body())
            objects = []
            for item in asked["objects"]:
                known = {"oid": item["oid"], "size": item["size"]}
                if item["oid"] not in hub.large:
                    actions = {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}
                    actions["verify"] = {"href": f"{hub.url}/lfs/{item['oid']}/verify"}
                    known["actions"] = actions
                objects.append(known)
            self._answer(200, {"transfer": "basic", "objects": objects})

        def receive(self, oid):
            data = self._body()
            if hashlib.sha256(data).hexdigest() != oid:
                return self._answer(400, {"error": "wrong checksum"})
            hub.large[oid] = data
            self._answer(200)

        def verify(self, oid):
            self._body()
            self._answer(200 if oid in hub.large else 404)

        def commit(self, repo, revision):
            lines = [json.loads(line) for line in self._body().decode().splitlines() if line]
            found = self._repo(repo)
            if found is None:
                return
            if self._owner != repo.partition("/")[0]:
                return self._refuse(403, "", "Forbidden: you must use a write token")
            files = dict(found.commits[found.refs[revision]])
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            oid = found.commit(revision, files, lines[0]["value"]["summary"])
            self._answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{repo}/commit/{oid}"})

        # ---- downloads

        def file(self, repo, revision, path):
            if (found := self._repo(repo)) is None:
                return
            if (oid := found.resolve(revision)) is None:
                return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            data = found.commits[oid].get(path)
            if data is None:
                return self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self._answer(200, data, X_Repo_Commit=oid, ETag=etag)

    repo, rev = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>.+?)"
    ROUTES = [
        (r"POST /test/die/(?P<at>.+)", Handler.die),
        (r"POST /test/busy/(?P<what>.+)", Handler.be_busy),
        (r"GET /api/whoami-v2", Handler.whoami),
        (r"GET /api/models", Handler.list_models),
        (r"POST /api/repos/create", Handler.create),
        (r"POST /api/validate-yaml", Handler.validate_yaml),
        (rf"POST /api/models/{repo}/branch/(?P<branch>.+)", Handler.branch),
        (rf"POST /api/models/{repo}/tag/{rev}", Handler.tag),
        (rf"POST /api/models/{repo}/preupload/{rev}", Handler.preupload),
        (rf"POST /api/models/{repo}/commit/{rev}", Handler.commit),
        (rf"GET /api/models/{repo}/tree/{rev}", Handler.tree),
        (rf"GET /api/models/{repo}/revision/{rev}", Handler.info),
        (rf"GET /api/models/{repo}", Handler.info),
        (rf"POST /{repo}\.git/info/lfs/objects/batch", Handler.batch),
        (r"PUT /lfs/(?P<oid>[0-9a-f]+)", Handler.receive),
        (r"POST /lfs/(?P<oid>[0-9a-f]+)/verify", Handler.verify),
        (rf"(GET|HEAD) /{repo}/resolve/{rev}/(?P<path>[^/]+)", Handler.file),
    ]
    return Handler
