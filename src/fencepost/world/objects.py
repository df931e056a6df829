"""The door to a bucket: one object at a time, written under conditions; errors say what is true.

The client's own retries are off: a write that is sent twice by a library answers for the wrong one
of the two. Its messages show addresses, answers and now and then a token, so they are told anew.
"""

from __future__ import annotations

import os
import re

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from fencepost.errors import (
    BadUrl,
    FencepostError,
    Misuse,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnfit,
)
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from obstore import UpdateVersion
    from obstore.store import ClientConfig, ObjectStore

    from fencepost.world.api import T

CONNECT_TIMEOUT = 5.0
# Servers close connections that are idle for some 20 s. A request that meets that has no outcome.
_IDLE = "10s"
_PAGE = 1000
_KINDS: Mapping[str, Callable[..., ObjectStore]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
# By which variables people send the client to a server of their own.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_MISSING = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_THROTTLED = {"SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded"}
_HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-store"}

# The process in which a client was first used. Its threads do not survive a fork, and a child that
# asks without them waits for ever.
_used_by = 0


class Version(NamedTuple):
    """Which content of an object: by its etag, and by its generation where there is one."""

    e_tag: str
    generation: str | None = None


class Found(NamedTuple):
    """An object as it was read: its content, which that is, and the server's stamp of it."""

    body: bytes
    version: Version
    modified: float


class Bucket:
    """The objects of one bucket below one prefix, for any thread."""

    def __init__(self, client: ObjectStore, *, kind: str, where: str, alone: bool = False) -> None:
        self.kind, self.where = kind, where
        self._client = client
        self._alone = alone  # it lives in this process: no connections, no threads

    def read(self, key: str) -> Found | None:
        """Return an object, or None if there is none."""
        try:
            answer = self._ask(obstore.get, key)
            body, meta = bytes(answer.bytes()), answer.meta
        except FileNotFoundError as error:
            self._refuse_missing(error)
            return None
        except (BaseError, OSError) as error:
            raise self._told(error, "read", changes=False) from _quoted(error)
        version = Version(self._tagged(meta["e_tag"]), meta["version"])
        return Found(body, version, meta["last_modified"].timestamp())

    def create(self, key: str, body: bytes) -> Version | None:
        """Write an object that must not exist; None if it does, or if others write it now."""
        return self._write(key, body, mode="create")

    def replace(self, key: str, body: bytes, version: Version) -> Version | None:
        """Write an object that must still be as it was read; None if it is not."""
        current: UpdateVersion = {"e_tag": version.e_tag}
        if version.generation is not None:
            current["version"] = version.generation
        return self._write(key, body, mode=current)

    def stamp(self, key: str, body: bytes) -> float:
        """Overwrite an object and return the server's stamp of that, or of a later write.

        It is of no consequence whether it was written: what is not known did not happen.
        """
        try:
            self._ask(
                obstore.put, key, body, mode="overwrite", attributes=_HEADERS, use_multipart=False
            )
            stamped: float = self._ask(obstore.head, key)["last_modified"].timestamp()
        except FileNotFoundError as error:
            self._refuse_missing(error)
            raise StoreUnavailable(f"{self.where} has lost an object just written") from error
        except (BaseError, OSError) as error:
            raise self._told(error, "write", changes=False) from _quoted(error)
        return stamped

    def remove(self, key: str) -> None:
        """Remove an object that nobody depends on; it may be gone, or stay."""
        try:
            self._ask(obstore.delete, key)
        except (BaseError, OSError):
            return

    def tags(self, folder: str) -> dict[str, str]:
        """Return the keys in a folder, with their etags."""
        found: dict[str, str] = {}
        try:
            self._refuse_fork()
            for page in obstore.list(self._client, prefix=folder, chunk_size=_PAGE):
                found.update((one["path"], one["e_tag"] or "") for one in page)
        except (BaseError, OSError) as error:
            raise self._told(error, "list", changes=False) from _quoted(error)
        return found

    def _write(self, key: str, body: bytes, *, mode: Any) -> Version | None:
        try:
            answer = self._ask(obstore.put, key, body, mode=mode, attributes=_HEADERS)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
            self._refuse_missing(error)
            return None
        except (BaseError, OSError) as error:
            raise self._told(error, "write", changes=True) from _quoted(error)
        return Version(self._tagged(answer["e_tag"]), answer["version"])

    def _ask(self, verb: Callable[..., T], *args: object, **options: object) -> T:
        self._refuse_fork()
        return verb(self._client, *args, **options)

    def _refuse_fork(self) -> None:
        global _used_by  # noqa: PLW0603 -- it is the process that this is about
        if self._alone:
            return
        if _used_by and _used_by != os.getpid():
            raise Misuse(
                f"{self.where} cannot be used in a process that was forked from one that used it: "
                "start processes with 'spawn' or 'forkserver', or use it in children only"
            )
        _used_by = os.getpid()

    def _tagged(self, e_tag: str | None) -> str:
        if not e_tag:
            raise StoreUnfit(
                f"{self.where} gives its objects no etags: leases cannot be kept there"
            )
        return e_tag

    def _refuse_missing(self, error: Exception) -> None:
        if _code(error) in _MISSING:
            cause = _quoted(error)
            raise StoreUnfit(f"{self.where} does not exist: create the bucket first") from cause

    def _told(  # noqa: C901, PLR0911 -- a table of answers
        self, error: Exception, verb: str, *, changes: bool
    ) -> FencepostError:
        """Return what an error of the client means for the caller."""
        text, code, status = str(error), _code(error), _status(error)
        if "169.254." in text or "metadata.google" in text:
            # Asked for where instances of a cloud find them: it may be that we are on none.
            none = f"no credentials for {self.where}: set {_CREDENTIALS[self.kind]}"
            return StoreUnfit(none) if 400 <= status < 500 else StoreUnavailable(none)
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or "Token" in code:
            return self._refused(verb, code)
        self._refuse_missing(error)
        if status == 429 or code in _THROTTLED:  # any other 503 may come from something between
            return StoreUnavailable(f"{self.where} asks for fewer requests ({status} {code})")
        if status in (301, 307) or "BareRedirect" in text:
            return StoreUnfit(f"{self.where} is in another region: say which with region=…")
        if "BadScheme" in text:
            return StoreUnfit(
                f"{self.where} is reached by plain http: say allow_http=true if meant"
            )
        if status == 501 or isinstance(error, NotImplementedError):
            return StoreUnfit(f"{self.where} does not know conditional writes: leases need them")
        if status and status < 500 and status != 408 and code != "RequestTimeout":
            return StoreUnfit(f"{self.where} refused to {verb} an object ({status} {code})")
        if "HttpError {" in text and re.search(r"kind: Connect\b", text):
            return StoreUnavailable(f"{self.where} cannot be reached: is the address right?")
        why = f"it answered {status} {code}".rstrip() if status else "no answer came"
        if "kind: Timeout" in text:
            why = "no answer came in time"
        if changes:
            return OutcomeUnknown(f"an object was sent to {self.where}, and {why}")
        return StoreUnavailable(f"{self.where} did not {verb} an object: {why}")

    def _refused(self, verb: str, code: str) -> StoreUnfit:
        if code == "RequestTimeTooSkewed":
            return StoreUnfit(
                f"{self.where} refuses a clock this wrong: set the time of this machine"
            )
        if code in ("", "AccessDenied", "AuthorizationPermissionMismatch"):
            return StoreUnfit(
                f"the credentials for {self.where} may not {verb} objects: leases need the rights "
                "to get, put and list"
            )
        return StoreUnfit(
            f"the credentials for {self.where} were refused ({code}): check "
            f"{_CREDENTIALS[self.kind]}"
        )


def open_bucket(
    kind: str,
    bucket: str,
    *,
    prefix: str,
    where: str,
    config: Mapping[str, object],
    client: Mapping[str, object],
    timeout: float,
) -> Bucket:
    """Open a bucket; nothing is asked of it yet. Credentials come from the environment."""
    options: dict[str, Any] = {
        **client,
        "timeout": f"{int(timeout * 1000)}ms",
        "connect_timeout": f"{int(min(timeout, CONNECT_TIMEOUT) * 1000)}ms",
        "pool_idle_timeout": _IDLE,
    }
    opened: ClientConfig = options  # type: ignore[assignment]
    try:
        store = _KINDS[kind](
            bucket,
            prefix=prefix or None,
            config=dict(config) or None,
            client_options=opened,
            retry_config={"max_retries": 0},
        )
    except (BaseError, ValueError) as error:
        raise BadUrl(f"{where} cannot be opened: {_quoted(error)}") from _quoted(error)
    return Bucket(store, kind=kind, where=where)


def endpoint_of_environment(kind: str) -> str:
    """Return where the environment sends the client; "" for the cloud itself."""
    return next((os.environ[name] for name in _ENDPOINTS[kind] if os.environ.get(name)), "")


class _Driver(Exception):
    """What the client library said, without what nobody else should read."""


def _quoted(error: Exception) -> _Driver:
    """Return a cause that may be shown: answers may echo tokens, and addresses signatures."""
    text = str(error)
    said = re.sub(r"(status code: \d{3}).*", r"\1", text.partition("\n")[0].partition("<")[0])
    said = re.sub(r"\?\S*", "", said)
    kinds = re.findall(r"(?:kind|source): ([A-Z]\w*),", text)
    return _Driver(" ".join([f"{type(error).__name__}: {said}", _code(error), *kinds]).strip())


def _code(error: Exception) -> str:
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    return found[1] if found else ""


def _status(error: Exception) -> int:
    found = re.search(r"status(?: code)?: (\d{3})", str(error))
    return int(found[1]) if found else 0
