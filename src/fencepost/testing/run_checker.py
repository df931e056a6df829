"""What is promised about runs, and a pure function that finds where a history breaks it.

one row      a run has one record, and it says what its history adds up to
lives        every change of state is in THE TABLE of ``model/run.py``; terminal states are for ever
newest wins  no write is accepted but from the newest claim of a run that runs; no rightful refused
counted      user code begins once for each claim at most, and after a claim that counted it; the
             request that had the last attempt is not granted another one
on loss      where a loss is the end, nothing is claimed after one
ordered      an attempt whose process was ordered to stop, on record, is counted as no loss, unless
             a loss is the end
limit        runs side by side stay within their permits
true end     a run ends as its body was left, and only what was asked to be is cancelled
items        an effect outside happens once, or again only where its policy says so; what happened
             is done or in doubt, and what is done has happened
rows         what succeeded has each of its rows in the database exactly once
checkpoint   it never goes back, and each attempt begins where the last one saved
answers      whoever triggers gets an answer, unless it crashed, and the answer is true
due          a run is claimed only if its slot is due, and a trigger is about the slot it means
progress     after the storm every slot that was due has ended

The five promises of ``checker`` hold for the leases of runs as well, and are checked along. These
events are known beside its own: declared, due, triggered, outcome; claimed, adopted, beat, saved,
item_begun, item_ended, settled (all writes of an attempt), became (what others did to a run),
asked (for a cancel), ordered (to stop, and the ledger has it), counted_lost (by whoever claims the
run), stale (a refused write); began, left, effect, wrote; at the end row and item.
A ledger alone has ``concluded`` instead of settled: how the body was left is not on record.
"""

from __future__ import annotations

from fencepost.model.name import base
from fencepost.model.run import State, legal
from fencepost.testing.checker import Violation, check, in_order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepost.testing.history import Event

# How a body may have been left for its attempt to end in a state.
_TRUE_ENDS: dict[str, frozenset[str]] = {
    "succeeded": frozenset({"returned"}),
    "failed": frozenset({"failed"}),
    "timed_out": frozenset({"timed out"}),
    "skipped": frozenset({"skipped"}),
    "waiting_retry": frozenset({"failed", "timed out"}),
    "pending": frozenset({"interrupted"}),
    "cancelled": frozenset({"cancelled", "failed", "timed out", "interrupted"}),
}
_ANSWERS = {
    "succeeded": "succeeded",
    "already_done": "succeeded",
    "failed": "failed",
    "timed_out": "timed_out",
    "cancelled": "cancelled",
}
_GONE = frozenset({"done", "begun"})


def check_runs(history: Iterable[Event]) -> list[Violation]:
    """Return every broken promise about runs and their leases, in the order of time."""
    ordered = in_order(history)
    reader = _Reader()
    for position, event in enumerate(ordered):
        reader.read(position, event)
    reader.conclude()
    found = [*reader.violations, *check(ordered)]
    return sorted(found, key=lambda violation: violation.position)


class _Run:
    """A run, as far as it has been read."""

    __slots__ = (
        *("asked", "began", "checkpoint", "key", "left", "loss", "newest", "nonce"),
        *("starts", "state", "until"),
    )

    def __init__(self, key: str) -> None:
        self.key = key
        self.state: State | None = None
        self.newest = 0  # the token of the newest claim
        self.nonce = ""
        self.until = 0.0  # of the newest claim's lease
        self.starts = 0
        self.checkpoint = 0
        self.asked = False  # for a cancel
        self.loss = False
        self.began: set[int] = set()  # under which tokens
        self.left: dict[int, str] = {}


class _Reader:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._runs: dict[str, _Run] = {}
        self._policies: dict[str, dict[str, str]] = {}
        self._due: list[Event] = []
        self._effects: dict[str, list[Event]] = {}
        self._begun: dict[tuple[str, int], int] = {}
        self._wrote: dict[str, int] = {}
        self._rows: dict[str, Event] = {}
        self._items: dict[str, Event] = {}
        self._open: dict[str, Event] = {}
        self._ordered: set[str] = set()  # nonces of attempts that were to stop
        self._position = 0
        self._event: Event
        self._readers = {
            "declared": self._declared,
            "due": self._is_due,
            "triggered": self._triggered,
            "outcome": self._answered,
            "crashed": self._crashed,
            "claimed": self._claimed,
            "adopted": self._beat,
            "beat": self._beat,
            "saved": self._saved,
            "item_begun": self._item_begun,
            "item_ended": self._written,
            "settled": self._settled,
            "concluded": self._concluded,
            "became": self._became,
            "asked": self._asked,
            "ordered": self._was_ordered,
            "counted_lost": self._counted_lost,
            "broken": self._broken,
            "released": self._released,
            "stale": self._stale,
            "began": self._user_code_began,
            "left": self._user_code_left,
            "effect": self._effect,
            "wrote": self._row_written,
            "row": self._row,
            "item": self._item,
        }

    def read(self, position: int, event: Event) -> None:
        self._position, self._event = position, event
        reader = self._readers.get(event.what)
        if reader is not None:
            reader(event)

    def conclude(self) -> None:
        """Compare what was added up with what the ledger says in the end."""
        for due in self._due:
            row = self._rows.get(due.run)
            if row is None or not State(row.state).terminal:
                what = "has no record" if row is None else f"is still {row.state}"
                self._found("progress", f"{due.run} {what}", about=row or due)
        for triggered in self._open.values():
            self._found("answers", f"{triggered.holder} never got an answer", about=triggered)
        for key, effects in self._effects.items():
            self._conclude_item(key, effects)
        for key, item in self._items.items():
            if item.state == "done" and key not in self._effects:
                self._found("items", f"{key} is done, but never happened", about=item)
        for row in self._rows.values():
            if row.state == "succeeded":
                self._conclude_success(row)

    # Of triggers.

    def _declared(self, event: Event) -> None:
        words = (word.partition("=") for word in event.detail.split())
        self._policies[event.name] = {name: value for name, _, value in words}

    def _is_due(self, event: Event) -> None:
        self._due.append(event)

    def _triggered(self, event: Event) -> None:
        self._open[event.holder] = event

    def _answered(self, event: Event) -> None:
        asked = self._open.pop(event.holder, None)
        if asked is not None and asked.run != event.run:
            says = f"{event.holder} asked for {asked.run}, and was answered about {event.run}"
            self._found("due", says)
        state = self._run(event.run).state
        if event.state in _ANSWERS and (state is None or state.value != _ANSWERS[event.state]):
            now = state.value if state else "not there"
            self._found("answers", f"{event.holder} heard {event.state}, but {event.run} is {now}")

    def _crashed(self, event: Event) -> None:
        for which in [which for which, open_ in self._open.items() if open_.node == event.node]:
            del self._open[which]

    # Of runs.

    def _claimed(self, event: Event) -> None:
        run, policy = self._run(event.run), self._policy(event.run)
        if self._due and all(due.run != event.run for due in self._due):
            self._found("due", f"{run.key} was claimed, and is not due")
        if run.state is State.RUNNING:
            run.loss = True
        self._change(run, State.RUNNING, event)
        if event.token <= run.newest:
            self._found(
                "newest wins", f"{run.key} was claimed with {event.token} after {run.newest}"
            )
        if event.holder == run.nonce:
            self._found("counted", f"{run.key} was claimed twice by one request of {event.holder}")
        run.newest, run.nonce, run.until = event.token, event.holder, event.until
        if event.number != run.starts + 1:
            says = f"{run.key} was claimed with {event.number} starts after {run.starts}"
            self._found("counted", says)
        run.starts = event.number
        if run.loss and policy.get("on_loss") == "fail":
            self._found("on loss", f"{run.key} was claimed again after an attempt was lost")
        permit = event.name.removeprefix(base(event.name))[1:]
        if permit and int(permit) > int(policy.get("limit", permit)):
            self._found("limit", f"{run.key} runs on {event.name!r} of {policy['limit']}")

    def _beat(self, event: Event) -> None:
        run = self._written(event)
        run.until = max(run.until, event.until)

    def _saved(self, event: Event) -> None:
        run = self._written(event)
        if event.number < run.checkpoint:
            says = f"the checkpoint of {run.key} went from {run.checkpoint} back to {event.number}"
            self._found("checkpoint", says)
        run.checkpoint = event.number

    def _item_begun(self, event: Event) -> None:
        self._written(event)
        begun = (event.name, event.token)
        self._begun[begun] = self._begun.get(begun, 0) + 1

    def _written(self, event: Event) -> _Run:
        """Take note of an accepted write of an attempt."""
        run = self._run(event.run)
        if run.state is not State.RUNNING or (run.newest, run.nonce) != (event.token, event.holder):
            now = run.state.value if run.state else "not there"
            self._found(
                "newest wins",
                f"{event.what} of {run.key} was accepted from {event.holder} with token "
                f"{event.token}, but it is {now} and {run.nonce} has token {run.newest}",
            )
        return run

    def _stale(self, event: Event) -> None:
        run = self._run(event.run)
        rightful = (run.newest, run.nonce) == (event.token, event.holder)
        if rightful and run.state is State.RUNNING and event.at < run.until:
            says = f"{event.detail} of {run.key} was refused, though {event.holder} has it"
            self._found("newest wins", says)

    def _settled(self, event: Event) -> None:
        run, state = self._written(event), State(event.state)
        self._change(run, state, event)
        left = run.left.get(event.token, "not left")
        if left not in _TRUE_ENDS.get(event.state, frozenset()):
            self._found("true end", f"{run.key} became {event.state}, but its body was {left}")
        if state is State.CANCELLED and not run.asked:
            self._found("true end", f"{run.key} was cancelled, and nobody had asked for that")
        self._compare_starts(run, event)

    def _concluded(self, event: Event) -> None:
        run = self._written(event)
        self._change(run, State(event.state), event)
        self._compare_starts(run, event)

    def _became(self, event: Event) -> None:
        run, state = self._run(event.run), State(event.state)
        if run.state is State.RUNNING:
            # Whoever ended or moved it did not have it: its attempt was lost, unless cancelled.
            run.loss = run.loss or state is not State.CANCELLED
        self._change(run, state, event)
        self._compare_starts(run, event)

    def _asked(self, event: Event) -> None:
        self._run(event.run).asked = True

    def _was_ordered(self, event: Event) -> None:
        self._ordered.add(event.holder)

    def _counted_lost(self, event: Event) -> None:
        policy = self._policy(event.run)
        if event.holder in self._ordered and policy.get("on_loss") != "fail":
            says = f"{event.run} was ordered to stop with token {event.token}, and counted as lost"
            self._found("ordered", says)

    def _broken(self, event: Event) -> None:
        for run in self._runs.values():
            if run.state is State.RUNNING and event.run in ("", run.key):
                run.until = 0.0  # its holder may be refused from now on

    def _released(self, event: Event) -> None:
        for run in self._runs.values():
            if run.nonce == event.holder:
                run.until = 0.0  # given back unheard of, by a holder who had given up on it

    def _change(self, run: _Run, state: State, event: Event) -> None:
        if not legal(run.state, state):
            before = run.state.value if run.state else "not there"
            says = f"{run.key} was {before} and became {state.value} at {event.at:.6f}"
            self._found("lives", says)
        run.state = state

    def _compare_starts(self, run: _Run, event: Event) -> None:
        if event.number != run.starts:
            says = (
                f"{run.key} has {event.number} starts on record, and was claimed {run.starts} times"
            )
            self._found("counted", says)

    # Of user code.

    def _user_code_began(self, event: Event) -> None:
        run = self._run(event.run)
        if event.token in run.began:
            self._found("counted", f"{run.key} began twice under token {event.token}")
        run.began.add(event.token)
        if len(run.began) > run.starts:
            says = f"{run.key} began {len(run.began)} times, with {run.starts} starts on record"
            self._found("counted", says)
        if event.token == run.newest and event.number != run.checkpoint:
            says = f"{run.key} began at {event.number}, but {run.checkpoint} had been saved"
            self._found("checkpoint", says)

    def _user_code_left(self, event: Event) -> None:
        self._run(event.run).left[event.token] = event.detail

    def _effect(self, event: Event) -> None:
        had = self._effects.setdefault(event.name, [])
        had.append(event)
        if (event.name, event.token) not in self._begun:
            self._found("items", f"{event.name} happened, and was never begun with {event.token}")
        if len(had) == 1:
            return
        if self._policy(event.run).get("in_doubt") == "report":
            self._found("items", f"{event.name} happened again, with token {event.token}")
        elif any(other.token == event.token for other in had[:-1]):
            self._found("items", f"{event.name} happened twice in one attempt")

    def _row_written(self, event: Event) -> None:
        self._wrote[event.name] = self._wrote.get(event.name, 0) + 1

    # At the end.

    def _row(self, event: Event) -> None:
        if event.run in self._rows:
            self._found("one row", f"{event.run} has more than one record")
        self._rows[event.run] = event
        run = self._run(event.run)
        if run.state is not None and run.state.value != event.state:
            says = f"{event.run} was {run.state.value}, and its record says {event.state}"
            self._found("lives" if run.state.terminal else "one row", says)
        self._compare_starts(run, event)

    def _item(self, event: Event) -> None:
        self._items[event.name] = event

    def _conclude_item(self, key: str, effects: list[Event]) -> None:
        item, policy = self._items.get(key), self._policy(effects[-1].run)
        if item is not None and policy.get("in_doubt") == "repeat":
            # A repetition that failed says so of itself, not of what it was to repeat.
            effects = [effect for effect in effects if effect.token == item.token]
            if not effects:
                return
        if item is None or item.state not in _GONE:
            what = "has no record" if item is None else f"is {item.state}"
            self._found("items", f"{key} happened, but {what}", about=effects[-1])

    def _conclude_success(self, row: Event) -> None:
        policy = self._policy(row.run)
        scope = row.run.partition("@")[0] if policy.get("scope") == "job" else row.run
        for number in range(int(policy.get("items", 0))):
            name = f"{scope}/i{number}"
            if number % 2:
                times = self._wrote.get(name, 0)
                if times != 1:
                    self._found("rows", f"{row.run} succeeded, but {name} is there {times} times")
            elif name not in self._items:
                self._found("items", f"{row.run} succeeded without {name}", about=row)

    def _run(self, key: str) -> _Run:
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Run(key)
        return run

    def _policy(self, key: str) -> dict[str, str]:
        return self._policies.get(key.partition("@")[0], {})

    def _found(self, rule: str, says: str, *, about: Event | None = None) -> None:
        self.violations.append(Violation(rule, says, about or self._event, self._position))
