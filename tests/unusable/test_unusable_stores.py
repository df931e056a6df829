"""Whatever is wrong with a server: one clear sentence, exit code 3, nothing half done, and on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import faults_others  # noqa: F401 -- they fill the list
import faults_sql  # noqa: F401
import pytest

from fencepost import Fencepost
from fencepost.cli.main import main
from fencepost.errors import OutcomeUnknown, StoreUnavailable, StoreUnfit
from servers.objects import KEY, SECRET as KEYS_SECRET
from unusable import FAULTS, SECRET, Unusable, keeps_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

FENCEPOST = str(Path(sys.executable).parent / "fencepost")
# No server has room for it where it has none at all: it is longer than what a page may have left.
NAME = f"{'asked-in-vain':-<120}"
LOOKING = (["locks"], ["status"])
CHANGING = (
    ["lock", "break", NAME, "--token=1", "--reason=r"],
    ["run", NAME, "--manual"],
    ["tick"],
)
OF_JOBS = ("status", "run", "tick")


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Asker:
    """Somebody at the command line, in a folder with one job."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.folder, self.mark = capsys, folder, folder / "was-run"
        (folder / "jobs.toml").write_text(
            f'[[job]]\nname = "{NAME}"\nevery = "1h"\ncommand = ["touch", "{self.mark}"]\n'
        )

    def asks(self, words: Sequence[str], url: str) -> Said:
        """Ask in this process: most of a command's time is that of its start."""
        self._capsys.readouterr()
        code = main([*words, "--url", url])
        return Said(code, *self._capsys.readouterr())

    def runs(self, url: str, *words: str) -> Said:
        """Have a command run that leaves a mark."""
        done = subprocess.run(
            [FENCEPOST, "exec", NAME, "--url", url, *words, "--", "touch", str(self.mark)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def asker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Asker:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS_SECRET)
    return Asker(tmp_path, capsys)


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_used_says_so_in_one_sentence_and_goes_on_once_mended(
    name: str, asker: Asker
) -> None:
    with FAULTS[name]() as broken:
        url = broken.mended or broken.url
        refuses(asker, broken, jobs=keeps_runs(url))
        broken.mend()
        goes_on(asker, url, jobs=keeps_runs(url))
        assert not broken.finds or f"[{broken.finds}]" not in asker.asks(["doctor"], url).out


def refuses(asker: Asker, broken: Unusable, *, jobs: bool) -> None:
    """Check what every verb says, and that no command was run."""
    said = asker.runs(broken.url, "--ttl", "5s")
    in_one_line(said, code=69, says=broken.says)
    assert "the command was not run" in said.err
    if jobs:
        in_one_line(asker.runs(broken.url, "--manual"), code=69, says=broken.says)
    for verb in (*CHANGING, *LOOKING, ["doctor"]):
        if not broken.gone and (jobs or verb[0] not in OF_JOBS):
            said = asker.asks(verb, broken.url)
            assert said.code in expected_of(verb, broken), (verb[0], said)
            if said.code == 3:
                in_one_line(said, code=3, says="" if verb in LOOKING else broken.says)
            if verb == ["doctor"] and broken.finds:
                assert re.search(rf"breaks .*\[{broken.finds}\]$", said.out, re.MULTILINE), said
            assert SECRET not in said.out + said.err
    assert not asker.mark.exists()
    with (
        Fencepost(broken.url, on_event=None) as fp,
        pytest.raises((StoreUnavailable, StoreUnfit, OutcomeUnknown), match=broken.says),
    ):
        fp.lock(NAME, ttl="2s").acquire()


def expected_of(verb: Sequence[str], broken: Unusable) -> set[int]:
    if verb in (["tick"], ["status"]):
        # If nothing is due there may be nothing to write; to open a ledger there may be something.
        return {3, broken.looks}
    if verb in LOOKING:
        return {broken.looks}
    if verb == ["doctor"]:
        return {0, 3} if broken.doctor is None else {broken.doctor}
    return {broken.breaking if verb[0] == "lock" else 3}


def in_one_line(said: Said, *, code: int, says: str) -> None:
    assert said.code == code, said
    assert said.out == ""
    assert re.search(says, said.err), said.err
    assert len(said.err.splitlines()) == 1, said.err
    assert SECRET not in said.err


def goes_on(asker: Asker, url: str, *, jobs: bool) -> None:
    """Check that nothing is left of what was asked in vain."""
    with Fencepost(url) as fp:
        assert NAME not in [view.name for view in fp.locks()]
        if jobs:
            assert list(fp.runs(NAME)) == []
    assert asker.runs(url, "--ttl", "5s") == Said(0, "", "")
    assert asker.mark.exists()
    if jobs:
        assert asker.asks(["run", NAME, "--manual"], url).code == 0
        assert asker.asks(["status"], url).code == 0
    assert asker.asks(["locks"], url).code == 0
