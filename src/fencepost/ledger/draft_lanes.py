"""What is being made up, as one transaction has read it and will leave it."""

from __future__ import annotations

from fencepost.ledger.draft_values import lane_of, lane_row
from fencepost.ledger.planning import PAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.planning import Lane


class LaneShelf:
    """The lanes of a draft."""

    def __init__(self, draft: Draft, namespace: str) -> None:
        self._draft, self._namespace, self._sql = draft, namespace, draft.dialect.plans
        self._lanes: dict[int, Lane] = {}
        self._lanes_seen: dict[int, tuple[Lane, Any]] = {}
        self._lanes_of: set[str] = set()  # the jobs of which every open lane is here
        self._page: list[Lane] | None = None  # the first that are due, if they were read
        self._highest: int | None = None

    def took_lanes(
        self, rows: Iterable[Sequence[Any]], *, jobs: Iterable[str] = (), page: bool = False
    ) -> list[Lane]:
        """Keep lanes that were read."""
        found = []
        for row in rows:
            lane = lane_of(row)
            if lane.number not in self._lanes:
                self._lanes_seen[lane.number] = (lane, row[-1])
                self._lanes[lane.number] = lane
            found.append(lane)
        self._lanes_of.update(jobs)
        if page:
            self._page = found
        return found

    def lane_jobs(self) -> set[str]:
        """Return the jobs whose lanes are here."""
        return {lane.job for lane in self._lanes.values()}

    def due_lanes(self, *, jobs: Iterable[str]) -> Iterator[Lane]:
        """Yield what is to be made up now: of these jobs, and page by page whatever is due."""
        freed = sorted(jobs)
        self._read_lanes_of(freed)
        seen: set[int] = set()
        last = (float("-inf"), 0)
        page = self._page
        if page is None:
            page = self.took_lanes(self._draft.ask([self.due_lanes_step(last)])[0])
        self._page = None
        open_ones = [lane for lane in self._lanes.values() if not lane.ended_at]
        first = [lane for lane in open_ones if lane.job in freed]
        due = [lane for lane in open_ones if lane.job not in freed]
        due = [lane for lane in due if lane.not_before <= self._draft.now]
        first.sort(key=lambda lane: (lane.job, lane.number))
        due.sort(key=lambda lane: (lane.not_before, lane.number))
        for lane in (*first, *due):
            seen.add(lane.number)
            yield lane
        while len(page) == PAGE:
            last = (page[-1].not_before, page[-1].number)
            page = self.took_lanes(self._draft.ask([self.due_lanes_step(last)])[0])
            for lane in page:
                if lane.number not in seen:
                    yield lane

    def lanes(self, job: str) -> list[Lane]:
        """Return what is being made up of a job."""
        self._read_lanes_of([job])
        lanes = (lane for _, lane in sorted(self._lanes.items()))
        return [lane for lane in lanes if lane.job == job and not lane.ended_at]

    def lane(self, number: int) -> Lane | None:
        """Return one of what was ever to be made up."""
        if number not in self._lanes:
            values = {"namespace": self._namespace, "number": number}
            self.took_lanes(self._draft.ask([(self._sql.FIND_LANE, values)])[0])
        return self._lanes.get(number)

    def put_lane(self, lane: Lane) -> Lane:
        """Keep what is being made up as it is now; number it, if it is new."""
        if not lane.number:
            if self._highest is None:
                values = {"namespace": self._namespace}
                self._highest = self._draft.ask([(self._sql.HIGHEST_LANE, values)])[0][0][0]
            assert self._highest is not None, "there is always a highest number"
            self._highest += 1
            lane = lane._replace(number=self._highest)
        self._lanes[lane.number] = lane
        return lane

    def _read_lanes_of(self, jobs: Iterable[str]) -> None:
        unknown = sorted(set(jobs) - self._lanes_of)
        if unknown:
            self.took_lanes(self._draft.ask([self.lanes_of_step(unknown)])[0], jobs=unknown)

    def due_lanes_step(self, last: tuple[float, int]) -> Step:
        """Return what reads a page of lanes that are due."""
        due, number = last
        values = {"namespace": self._namespace, "due": due, "number": number, "most": PAGE}
        return self._sql.FIND_DUE_LANES, values

    def lanes_of_step(self, jobs: list[str]) -> Step:
        """Return what reads the open lanes of some jobs."""
        return self._sql.FIND_LANES_OF, {"namespace": self._namespace, "jobs": jobs}

    def lane_steps(self) -> list[Step]:
        """Return what writes the lanes that have changed."""
        made, moved = [], []
        for number, lane in sorted(self._lanes.items()):
            before = self._lanes_seen.get(number)
            if before is None:
                made.append(lane_row(lane))
            elif lane != before[0]:
                moved.append((lane_row(lane), before[1]))
        return [
            *self._draft.moved(self._sql.UPDATE_LANES, moved),
            *self._draft.rows(self._sql.INSERT_LANES, made),
        ]
