"""What fencepost costs at start-up: to ``import`` it, and to put it in front of a command.

``import fencepost`` stands beside ``python -c pass``. ``fencepost exec x -- true`` stands beside
the least that could do its job: a program of argparse, sqlite3 and subprocess that commits a row,
runs the command, and commits again. Wall time is from start to end; CPU time includes children.

    python bench/startup.py [--quick]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import NamedTuple

import harness

BARE = """
import argparse, sqlite3, subprocess, sys
parser = argparse.ArgumentParser(prog="bare")
parser.add_argument("--file", required=True)
verbs = parser.add_subparsers(required=True)
run = verbs.add_parser("exec")
run.add_argument("name")
run.add_argument("command", nargs=argparse.REMAINDER)
asked = parser.parse_args()
db = sqlite3.connect(asked.file, isolation_level=None)
db.execute("PRAGMA journal_mode=WAL")
db.execute("CREATE TABLE IF NOT EXISTS lease (name TEXT PRIMARY KEY, held INTEGER)")
db.execute("INSERT OR REPLACE INTO lease VALUES (?, 1)", (asked.name,))
code = subprocess.call([word for word in asked.command if word != "--"])
db.execute("UPDATE lease SET held = 0 WHERE name = ?", (asked.name,))
sys.exit(code)
"""


class Pair(NamedTuple):
    """A program, what it is compared with, and how much more it may cost."""

    ours: str
    floor: str
    target: harness.Target


class Took(NamedTuple):
    """The seconds that one program took from its start to its end."""

    wall: float
    cpu: float


PAIRS = (
    Pair("import fencepost", "python -c pass", harness.Target(at_most=3.0)),
    Pair("fencepost exec x -- true", "bare program exec x -- true", harness.Target(at_most=1.5)),
)


def compile_package() -> None:
    """Compile fencepost as an installation would: some machines are told to write no bytecode."""
    import compileall

    import fencepost

    compileall.compile_dir(os.path.dirname(fencepost.__file__), quiet=1)


def main() -> None:
    compile_package()
    rounds = 8 if "--quick" in sys.argv else 40
    with harness.workdir() as folder:
        environment = {**os.environ, "FENCEPOST_URL": f"sqlite:///{folder}/fencepost.db"}
        commands = programs(folder)
        missing = {
            name
            for name, words in commands.items()
            if run(words, environment, folder) is None or run(words, environment, folder) is None
        }
        names = [name for name in commands if name not in missing]
        samples: dict[str, list[Took]] = {name: [] for name in names}
        for _ in range(rounds):
            names.reverse()
            for name in names:
                took = run(commands[name], environment, folder)
                assert took is not None, f"{name} worked before and fails now"
                samples[name].append(took)
    report(samples, rounds=rounds)


def programs(folder: str) -> dict[str, list[str]]:
    bare = os.path.join(folder, "bare.py")
    with open(bare, "w", encoding="utf-8") as file:
        file.write(BARE)
    ours = os.path.join(os.path.dirname(sys.executable), "fencepost")
    job = ["exec", "x", "--", "true"]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import fencepost": [sys.executable, "-c", "import fencepost"],
        "bare program exec x -- true": [sys.executable, bare, "--file", folder + "/bare.db", *job],
        "fencepost exec x -- true": [ours, *job],
    }


def run(words: list[str], environment: dict[str, str], folder: str) -> Took | None:
    """Run a program to its end; None if it is not there or fails."""
    begin = time.perf_counter()
    try:
        child = subprocess.Popen(
            words, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return None
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    return Took(wall, usage.ru_utime + usage.ru_stime) if child.returncode == 0 else None


def report(samples: dict[str, list[Took]], *, rounds: int) -> None:
    rows: list[harness.Row] = []
    facts: harness.Row = {}
    for pair in PAIRS:
        rows += [row(name, samples.get(name)) for name in (pair.floor, pair.ours)]
        if pair.ours not in samples or pair.floor not in samples:
            continue
        ours, floor = samples[pair.ours], samples[pair.floor]
        wall = harness.ratios([took.wall for took in ours], [took.wall for took in floor])
        cpu = harness.ratios([took.cpu for took in ours], [took.cpu for took in floor])
        judged = pair.target.judged(wall.median)
        rows[-1] |= {"wall ratio": wall, "cpu ratio": cpu, "target": judged}
        facts[pair.ours] = {"wall": wall._asdict(), "cpu": cpu._asdict(), "target": judged}
    harness.table(f"Start-up, {rounds} rounds", rows)
    harness.result("startup", **facts)


def row(name: str, took: list[Took] | None) -> harness.Row:
    blank: harness.Row = {"wall ratio": "", "cpu ratio": "", "target": ""}
    if took is None:
        return {"program": name, "wall ms": "not built yet", "cpu ms": "", **blank}
    wall = harness.Spread.of(one.wall * 1e3 for one in took)
    cpu = harness.Spread.of(one.cpu * 1e3 for one in took)
    return {"program": name, "wall ms": wall, "cpu ms": cpu, **blank}


if __name__ == "__main__":
    main()
