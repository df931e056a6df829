"""What a reviewer should never have to say. Reads the source, imports nothing of it."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fencepost"
LAYERS = [
    {"errors", "version"},
    {"model"},
    {"world"},
    {"stores"},
    {"ledger"},
    {"flows"},
    {"fence_awaited", "fence_mariadb", "fence_postgres"},
    {"fence", "logs", "importing", "hands"},
    {"lease", "verifier", "carried"},
    {"keeper"},
    {"holding"},
    {"jobs", "bodies", "effects", "transaction", "gate", "lent"},
    {"transaction_sqlite", "transaction_server"},
    {"running", "isolated", "alarm_ringing", "caller"},
    {"working", "isolated_child"},
    {"executors", "serving", "alarming"},
    {"serving_aio"},
    {"scheduling"},
    {"hearing", "stopping"},
    {"running_here", "running_aio"},
    {"declaring", "alarm_declaring", "alarm_faces", "blocking_schedules", "aio_schedules"},
    {"blocking", "aio"},
    {"finding", "leader"},
    {"jobfile"},
    {"cli"},
]
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
WORLDLY = {"asyncio", "threading", "socket", "time", "random", "select", "subprocess", "signal"}
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield node.module or ""


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {part_of(path) for path in FILES}
    assert parts - set(DEPTH) - {"testing", "__init__"} == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    part = part_of(path)
    for name in imports(path):
        target = name.removeprefix("fencepost.").split(".")[0]
        if name.startswith("fencepost.") and part in DEPTH and target != part:
            if part == "cli" and target == "testing":
                continue  # `fencepost simulate` is a face of the simulator
            assert DEPTH[target] < DEPTH[part], f"{path.relative_to(SOURCE)} imports {name}"


@pytest.mark.parametrize("part", ["model", "stores", "ledger", "flows"])
def test_only_the_world_touches_the_machine(part: str) -> None:
    for path in (SOURCE / part).rglob("*.py"):
        reached = WORLDLY & {name.split(".")[0] for name in imports(path)}
        assert not reached, f"{path.relative_to(SOURCE)} reaches around the world to {reached}"


def test_siblings_of_one_port_never_import_each_other() -> None:
    for path in (SOURCE / "stores").glob("*.py"):
        for name in imports(path):
            if name.startswith("fencepost.stores.") and path.stem != "open":
                sibling = name.rsplit(".", 1)[1]
                own = sibling == "api" or sibling.split("_")[0] == path.stem.split("_")[0]
                assert own, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 70, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_its_rule_first(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, "a module begins with the sentence that is its rule"
    assert docstring.splitlines()[0].rstrip().endswith((".", ":")), docstring.splitlines()[0]


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in FILES:
        assert not marks.search(path.read_text()), path


def test_no_committed_file_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    private = re.compile(
        "/ro" + "ot/|/ho" + "me/|files.python" + "hosted|py" + "pi.org|/wor" + "k/"
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            found = private.search(path.read_text(errors="replace"))
            assert found is None, f"{name}: {found}"


def test_the_two_faces_have_the_same_methods_with_the_same_arguments() -> None:
    blocking, aio = (_signatures(SOURCE / f"{face}.py") for face in ("blocking", "aio"))
    assert blocking["Fencepost"] == aio["AsyncFencepost"]
    assert blocking["Lock"] == aio["AsyncLock"]
    names = ("blocking_schedules", "aio_schedules")
    blocking, aio = (_signatures(SOURCE / f"{face}.py") for face in names)
    assert blocking["Schedules"] == aio["AsyncSchedules"]


def _signatures(path: Path) -> dict[str, dict[str, str]]:
    return {
        node.name: {
            function.name.replace("__a", "__"): ast.unparse(function.args)
            for function in node.body
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
