"""What docs/fencing.md shows is what runs."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest

from fencepost.fence import CREATE_GUARD

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parents[2] / "docs" / "fencing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ADDRESS = "127.0.0.1:8000"


def run(example: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def only(text: str) -> str:
    """Return the one example that contains ``text``."""
    (example,) = [str(example) for example in EXAMPLES if text in example]
    return example


class Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- as it is named there
        pass


@contextmanager
def serving(example: str, folder: Path) -> Iterator[str]:
    """Serve the ``app`` of an example on loopback, inside of ``folder``; yield its address."""
    names: dict[str, Any] = {}
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile(example, "docs/fencing.md", "exec"), names)
        with make_server("127.0.0.1", 0, names["app"], handler_class=Silent) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield f"127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()
                names["app"]._guards.close()
    finally:
        os.chdir(before)


def status(address: str, **headers: str) -> int:
    with closing(HTTPConnection(address, timeout=10)) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        client.request("POST", "/invoices", body=b"", headers=named)
        return client.getresponse().status


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    if ADDRESS in EXAMPLES[number]:
        with serving(only("FenceWSGI"), tmp_path) as address:
            run(EXAMPLES[number].replace(ADDRESS, address), tmp_path)
    else:
        run(EXAMPLES[number], tmp_path)


def test_the_service_of_the_docs_refuses_a_stale_token(tmp_path: Path) -> None:
    with serving(only("FenceWSGI"), tmp_path) as address:
        assert status(address) == 428
        assert status(address, Fencing_Token="5", Fencing_Resource="r") == 201
        assert status(address, Fencing_Token="6", Fencing_Resource="r") == 201
        assert status(address, Fencing_Token="5", Fencing_Resource="r") == 412
    with closing(sqlite3.connect(tmp_path / "service.db")) as conn:
        assert conn.execute("SELECT count(*) FROM invoice").fetchone() == (2,)


def test_the_documented_statement_is_the_one_that_is_used() -> None:
    (shown,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert shown.strip() == CREATE_GUARD.strip()
