"""A URL becomes a store, or a sentence that says what is wrong with it and shows no password."""

from __future__ import annotations

import importlib
import os
import re

from fencepost.errors import BadUrl, MissingExtra
from fencepost.model.name import checked_namespace
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


DEFAULT_URL = "sqlite:///fencepost.db"


class Scheme(NamedTuple):
    """Where the opener of a kind of store is found, and which extra installs what it imports."""

    module: str
    opener: str
    extra: str | None = None


_POSTGRES = Scheme("fencepost.stores.postgres", "open_postgres", "postgres")
_MARIADB = Scheme("fencepost.stores.mariadb", "open_mariadb", "mariadb")
_REDIS = Scheme("fencepost.stores.redis", "open_redis", "redis")
_ETCD = Scheme("fencepost.stores.etcd", "open_etcd", "etcd")
_ZOOKEEPER = Scheme("fencepost.stores.zookeeper", "open_zookeeper", "zookeeper")
_OBJECTS = Scheme("fencepost.stores.objects", "open_s3", "objects")
_SCHEMES = {
    "memory": Scheme("fencepost.stores.memory", "open_memory"),
    "sqlite": Scheme("fencepost.stores.sqlite", "open_sqlite"),
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "mariadb": _MARIADB,
    "mysql": _MARIADB._replace(opener="open_mysql"),
    "redis": _REDIS,
    "valkey": _REDIS,
    "rediss": _REDIS._replace(opener="open_rediss"),
    "etcd": _ETCD,
    "etcds": _ETCD._replace(opener="open_etcds"),
    "zookeeper": _ZOOKEEPER,
    "s3": _OBJECTS,
    "gs": _OBJECTS._replace(opener="open_gs"),
    "az": _OBJECTS._replace(opener="open_az"),
}


def register_store(scheme: str, module: str, *, opener: str, extra: str | None = None) -> None:
    """Teach ``Fencepost`` a kind of URL: ``opener(world, address, namespace=…)`` in ``module``."""
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise BadUrl(
            f"{scheme!r} cannot be a URL scheme: lower-case letters, digits, '+', '.', '-'"
        )
    _SCHEMES[scheme] = Scheme(module, opener, extra)


def open_store(url: str, world: World, *, namespace: str) -> LeaseStore:
    """Open the store that ``url`` names."""
    namespace = checked_namespace(namespace)
    scheme, separator, address = url.partition("://")
    found = _SCHEMES.get(scheme)
    if not separator or found is None:
        known = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise BadUrl(f"{redacted(url)!r} is not a store URL: it must begin with one of {known}")
    try:
        module = importlib.import_module(found.module)
    except ModuleNotFoundError as error:
        if found.extra is None:
            raise
        raise MissingExtra(f"{scheme}:// ({error.name} is missing)", extra=found.extra) from error
    opener: Callable[..., LeaseStore] = getattr(module, found.opener)
    return opener(world, address, namespace=namespace)


def anchored(url: str) -> str:
    """Return a URL that means the same file wherever the process may change its folder to."""
    path = url.removeprefix("sqlite:///")
    if path == url or path.startswith(("/", "?", ":memory:")) or not path:
        return url
    folder = os.getcwd().replace("%", "%25").replace("?", "%3F")
    return f"sqlite:///{folder}/{path}"


def redacted(url: str) -> str:
    """Return a URL that may be shown: without password, and without options that could hold one."""
    without_password = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)
    return re.sub(r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&]*", r"\1***", without_password)
