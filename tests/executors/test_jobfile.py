"""Jobs in a file: declared like those in code, or refused with one sentence that helps."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from endpoint_kit import Endpoint
from executor_kit import SLOT, record

from fencepost import AsyncFencepost, Fencepost, Misuse
from fencepost.finding import find_fencepost
from fencepost.jobfile import load, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = "jobfile_program"
PROGRAM = """
from fencepost import AsyncFencepost, Fencepost
fp = Fencepost("memory://found")
afp = AsyncFencepost("memory://found")
number = 7
class Holder:
    inner = fp
def greet(run):
    return f"hello from {run.job}"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / f"{MODULE}.py").write_text(PROGRAM)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_program"):
            del sys.modules[name]


@pytest.fixture
def fp(here: Path) -> Iterator[Fencepost]:
    with Fencepost(f"sqlite:///{here}/fp.db") as made:
        yield made


def written(here: Path, text: str) -> Path:
    path = here / "jobs.toml"
    path.write_text(text)
    return path


def test_all_three_kinds_of_bodies_run(
    here: Path, fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "very-secret")
    with Endpoint() as endpoint:
        path = written(
            here,
            f"""
            [[job]]
            name = "words"
            command = "echo 'a  b' $HOME"
            every = "1h"
            timeout = "90s"
            retry = {{ attempts = 5, base = "10s" }}

            [[job]]
            name = "list"
            command = ["printenv", "MORE"]
            env = {{ MORE = "yes" }}
            at = 2026-01-20T02:00:00Z

            [[job]]
            name = "shell"
            command = "echo $((1 + 2))"
            shell = true

            [[job]]
            name = "hook"
            http = "{endpoint.url}/hook"
            secret_env = "HOOK_SECRET"
            headers = {{ X-Team = "ops" }}
            request_timeout = 5

            [[job]]
            name = "greet"
            python = "{MODULE}:greet"
            """,
        )
        names = load(path, fp)
        assert names == ["words", "list", "shell", "hook", "greet"]
        outcomes = {name: fp.trigger(name, SLOT) for name in names}
        assert "fencepost-signature" in endpoint.asked[0].headers
    assert all(outcomes.values()), outcomes
    assert outcomes["words"].result["output"] == "a  b $HOME\n"
    assert outcomes["list"].result["output"] == "yes\n"
    assert outcomes["shell"].result["output"] == "3\n"
    assert outcomes["greet"].result == "hello from greet"
    assert record(fp, "words@2026-01-20T02:00:00Z").state.value == "succeeded"
    assert fp._working.registry.find("words").policy.retry.attempts == 5


def test_a_file_may_say_whose_store_it_means(here: Path) -> None:
    read = read_file(written(here, 'url = "memory://x"\nnamespace = "staging"\n'))
    assert (read.url, read.namespace, read.jobs) == ("memory://x", "staging", ())


def test_the_example_in_the_docs_is_one_that_can_be_loaded(
    here: Path, fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVOICES_SECRET", "very-secret")
    (here / "shop").mkdir()
    (here / "shop" / "jobs.py").write_text("def cleanup():\n    pass\n")
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    page = (Path(__file__).parents[2] / "docs" / "executors.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert load(written(here, example), fp) == ["backup", "invoices", "cleanup"]


ONE = '[[job]]\nname = "nightly"\n'
RUNS = ONE + 'command = "true"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("job = 3", "jobs.toml: 'job' must be written as [[job]]"),
        ("jobs = 3", "jobs.toml: 'jobs' is unknown; did you mean 'job'?"),
        ("url = 3", "jobs.toml: 'url' is a whole number: it must be a text"),
        ("[[job]", "jobs.toml: is not TOML:"),
        ('[[job]]\ncommand = "true"', "jobs.toml: job number 1: 'name' is missing"),
        (ONE, "job 'nightly': has nothing to run: give exactly one of 'command', 'http'"),
        (ONE + 'comand = "true"', "job 'nightly': 'comand' is unknown; did you mean 'command'?"),
        (RUNS + 'python = "a:b"', "has 'command' and 'python' to run: give exactly one"),
        (RUNS + 'timout = "1m"', "job 'nightly': 'timout' is unknown; did you mean 'timeout'?"),
        (RUNS + 'secret_env = "X"', "job 'nightly': 'secret_env' goes with 'http': leave it out"),
        (
            RUNS + "timeout = true",
            "'timeout' is a truth value: it must be a duration, such as '90s'",
        ),
        (RUNS + 'timeout = "soon"', "job 'nightly': "),
        (RUNS + 'max_losses = "5"', "'max_losses' is a text: it must be a whole number"),
        (RUNS + "tz = 1", "job 'nightly': 'tz' is a whole number: it must be a text"),
        (RUNS + 'idempotent = "yes"', "'idempotent' is a text: it must be true or false"),
        (RUNS + "at = 5", "'at' is a whole number: it must be a text or an instant"),
        (RUNS + 'overlap = "skp"', "job 'nightly': overlap is 'skp': it must be one of 'skip'"),
        (RUNS + 'cron = "61 * * * *"', "job 'nightly': "),
        (RUNS + "retry = true", "'retry' is a truth value: it must be a whole number or a table"),
        (RUNS + "retry = {attempt = 5}", "job 'nightly': 'retry': 'attempt' is unknown; did you"),
        (RUNS + 'retry = {base = "x"}', "job 'nightly': "),
        (RUNS + 'retry = {attempts = "5"}', "'retry': 'attempts' is a text: it must be a whole"),
        (RUNS + 'env = "A=1"', "'env' is a text: it must be a table of texts"),
        (RUNS + "env = {A = 1}", "'env' is a table of whole number: it must be a table of texts"),
        (RUNS + RUNS, "job 'nightly': is there twice: a job's name is its identity"),
        (ONE + "command = []", "job 'nightly': argv is []"),
        (
            ONE + "command = [1]",
            "'command' is a list of whole number: it must be a text or a list of texts",
        ),
        (ONE + 'command = "echo \'a"', "job 'nightly': 'command' cannot be split into words"),
        (ONE + 'command = ["a"]\nshell = true', "'shell' goes with a command in one text"),
        (ONE + 'http = "host/x"', "job 'nightly': http is"),
        (ONE + 'http = "http://h"\nsecret_env = "NOT_SET"', "'NOT_SET', which is not set: export"),
        (ONE + 'python = "nowhere"', "job 'nightly': 'nowhere' is not module:name"),
        (ONE + 'python = "no_such_program:x"', "there is no module 'no_such_program' in"),
        (ONE + f'python = "{MODULE}:gret"', f"module '{MODULE}' has no 'gret'; did you mean"),
        (ONE + f'python = "{MODULE}:number"', "which is a int"),
        (RUNS + 'lease = "1s"', "jobs.toml: job 'nightly' has a lease of 1.0 s, too short"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(
    here: Path, fp: Fencepost, text: str, sentence: str
) -> None:
    path = written(here, text)
    with pytest.raises(Misuse) as refused:
        load(path, fp)
    told = str(refused.value)
    assert told.startswith(str(path))
    assert sentence in told
    assert "\n" not in told


def test_nothing_of_a_file_is_declared_if_any_of_it_cannot_be_read(
    here: Path, fp: Fencepost
) -> None:
    path = written(here, RUNS + '[[job]]\nname = "other"\n')
    with pytest.raises(Misuse):
        load(path, fp)
    assert list(fp._working.registry) == []


def test_a_file_that_is_not_there_is_named(here: Path, fp: Fencepost) -> None:
    with pytest.raises(Misuse, match=r"gone\.toml: cannot be read: No such file"):
        load(here / "gone.toml", fp)


def test_a_fencepost_is_found_in_the_current_folder(here: Path) -> None:
    assert isinstance(find_fencepost(f"{MODULE}:fp"), Fencepost)
    assert isinstance(find_fencepost(f"{MODULE}:afp"), AsyncFencepost)
    assert find_fencepost(f"{MODULE}:Holder.inner") is find_fencepost(f"{MODULE}:fp")


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("", "is not module:name, such as myapp.jobs:fp"),
        ("myapp", "'myapp' is not module:name"),
        (":fp", "is not module:name"),
        ("./my/app.py:fp", "'./my/app.py' as a module is 'my.app'"),
        ("no_such_program:fp", "there is no module 'no_such_program' in"),
        ("no_such_program.jobs:fp", "there is no module 'no_such_program' in"),
        (f"{MODULE}:f", f"module '{MODULE}' has no 'f'; did you mean 'fp'?"),
        (f"{MODULE}:number", "is a int: give the name of a Fencepost or an AsyncFencepost"),
        ("broken_program:fp", "module 'broken_program' cannot be imported: ZeroDivisionError:"),
        ("exits_program:fp", "module 'exits_program' cannot be imported: SystemExit: 3"),
        ("needs_program:fp", "module 'needs_program' needs 'not_there_at_all', which is not inst"),
        ("typo_program:fp", "module 'typo_program' cannot be imported: SyntaxError:"),
    ],
)
def test_why_no_fencepost_was_found_is_told(here: Path, reference: str, sentence: str) -> None:
    programs: dict[str, Any] = {
        "broken": "1 / 0",
        "exits": "raise SystemExit(3)",
        "needs": "import not_there_at_all",
        "typo": "def f(:",
    }
    for name, text in programs.items():
        (here / f"{name}_program.py").write_text(text)
    with pytest.raises(Misuse) as refused:
        find_fencepost(reference)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        ONE + 'http = "https://x/y"\nheaders = {Authorization = "Bearer TOPSECRET", X = 1}',
        RUNS + 'env = {PASSWORD = "TOPSECRET", N = 1}',
        'url = ["postgresql://u:TOPSECRET@h/db"]',
    ],
)
def test_what_is_wrong_is_told_without_what_it_says(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(Misuse) as refused:
        read_file(path)
    assert "TOPSECRET" not in str(refused.value)
    assert "it must be" in str(refused.value)
