"""One commit on the Hugging Face Hub, and errors about it that can be read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import HubError, KnapsackError
from ..version import __version__
from .patience import TRIES, patiently

TOKEN_HINT = "run `hf auth login`, set HF_TOKEN, or pass token=…"


@dataclass(frozen=True)
class Publication:
    """What was, or would be, published.

    Attributes:
        files: ``{name in the repository: bytes}``.
        url: of the commit; None for a dry run.

    Example:
        >>> print(Publication("me/net", {"config.json": 1200}, "main", private=True, tag=None, url=None))
        would publish to me/net (private), branch main:
               1,200 bytes  config.json
    """

    repo_id: str
    files: dict[str, int]
    revision: str
    private: bool
    tag: str | None
    url: str | None

    def __str__(self):
        what = f"published {self.url}" if self.url else "would publish"
        where = f"{self.repo_id}{' (private)' if self.private else ''}, branch {self.revision}"
        head = f"{what} to {where}{f', tag {self.tag}' if self.tag else ''}:"
        return "\n".join([head, *(f"{size:>12,} bytes  {name}" for name, size in self.files.items())])


def publish(
    repo_id: str,
    files: Mapping[str, Path],
    texts: Mapping[str, Callable[[str], str]],
    *,
    optional: Sequence[str] = (),
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    tag: str | None = None,
    commit_message: str = "Publish",
    dry_run: bool = False,
) -> Publication:
    """Create the repository if needed and put all files into it in one commit.

    Args:
        texts: files whose text depends on the repository's final id.
        optional: files to delete from the repository where this commit does not bring them.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise HubError(
            f"{repo_id!r} is no repository id, expected 'name' or 'owner/name': {_line(str(error))}"
        ) from None
    branch = revision or "main"
    if dry_run:
        sizes = _sizes(files, {name: text(repo_id) for name, text in texts.items()})
        return Publication(repo_id, sizes, branch, private, tag, url=None)
    token = _checked_token(get_token() if token is None else token)
    if token is None:
        raise HubError(f"publishing {repo_id} needs a Hub token, and none was found: {TOKEN_HINT}")
    api = HfApi(token=token, library_name="timm-knapsack", library_version=__version__)
    step = "creating the repository"
    try:
        repo_id = patiently(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
        if branch != "main":
            step = f"creating the branch {branch}"
            patiently(lambda: api.create_branch(repo_id, branch=branch, exist_ok=True))
        step = "uploading"
        rendered = {name: text(repo_id) for name, text in texts.items()}
        operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        operations += [CommitOperationAdd(name, text.encode()) for name, text in rendered.items()]
        gone = set(optional) - set(files)
        if gone:
            there = set(patiently(lambda: api.list_repo_files(repo_id, revision=branch)))
            operations += [CommitOperationDelete(name) for name in sorted(gone & there)]
        commit = patiently(
            lambda: api.create_commit(repo_id, operations, commit_message=commit_message, revision=branch)
        )
        if tag is not None:
            step = f"setting the tag {tag}"
            patiently(lambda: api.create_tag(repo_id, tag=tag, revision=commit.oid))
    except KnapsackError:
        raise
    except Exception as error:  # from the Hub client or the network underneath; the block calls nothing else
        message = _explain(error, repo_id, step, api.endpoint, token)
        raise HubError(message) from (None if _tells(error, token) else error)  # a cause is printed with the error
    return Publication(repo_id, _sizes(files, rendered), branch, private, tag, url=commit.commit_url)


def _sizes(files: Mapping[str, Path], texts: Mapping[str, str]) -> dict[str, int]:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return sizes | {name: len(text.encode()) for name, text in texts.items()}


def _explain(error: Exception, repo_id: str, step: str, endpoint: str, token: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    line = _line(str(error).replace(token, "(the token)")) or type(error).__name__
    what = f"{step} for {repo_id} failed"
    if status == 401:
        return f"{what}: the Hub does not accept the token; {TOKEN_HINT}"
    if status == 403:
        return f"{what}: the token may not write to {repo_id}; give it write access, or publish under your own name"
    if status == 404:
        return f"{what}: {repo_id} is not there, or private and not open to this token; check the name, or {TOKEN_HINT}"
    if status == 409:
        return f"{what}: the Hub reports a conflict ({line}); choose another name, tag or branch"
    if status is not None:
        tried = f", {TRIES} times or with a long Retry-After" if status == 429 or status >= 500 else ""
        return f"{what}: {endpoint} answered {status}{tried} ({line}); try again later"
    return f"{what}: the connection to {endpoint} broke ({type(error).__name__}: {line}); run it again"


def _checked_token(token: str | None) -> str | None:
    """A token read from a file ends in a line break; what else no token has would be quoted in the client's error."""
    if token is None:
        return None
    token = token.strip() if isinstance(token, str) else ""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise HubError(f"this is no Hub token: it is empty, or has characters that none has; {TOKEN_HINT}")
    return token


def _tells(error: BaseException, secret: str) -> bool:
    """Whether an error, or one that it came of, has the secret in its message."""
    seen: list[BaseException] = []
    ahead: list[BaseException | None] = [error]
    while ahead:
        now = ahead.pop()
        if now is not None and now not in seen:
            seen.append(now)
            ahead += [now.__cause__, now.__context__]
    return any(secret in f"{now} {now!r}" for now in seen)


def _line(message: str) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
