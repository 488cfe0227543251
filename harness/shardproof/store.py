"""The results database: one SQLite file that has everything a run planned, observed and concluded.

The order of writing is the point. Scenarios are stored as planned before the first one runs, so that one
that vanishes is seen; an observation is stored before it is analysed, so that a failure of the analysis
loses nothing; a verdict is committed as soon as it exists, so that Ctrl-C, a crash or a full disk cost
only what had not been committed. A file that is not ours, is damaged, or was written by a newer
shardproof is refused and left as it is.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardproof import store_history
from shardproof.codec import fields_from_plain, from_plain, to_plain
from shardproof.errors import HarnessError, UsageError
from shardproof.issues.cure_check import CureCheck
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.store_history import Past, Shown
from shardproof.verdict import Verdict

DATABASE = "results.sqlite"
"""How the database is called in the folder of a run."""

SCHEMA_VERSION = 1
APPLICATION_ID = 0x53687066  # "Shpf" in the SQLite header: tells our files from other people's

_TABLES = """
CREATE TABLE runs (
  sequence INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, started_at TEXT NOT NULL, ended_at TEXT,
  command TEXT NOT NULL, seed INTEGER NOT NULL, versions TEXT NOT NULL, exclusions TEXT NOT NULL);
CREATE TABLE planned (
  run_id TEXT NOT NULL REFERENCES runs(id), position INTEGER NOT NULL, scenario_id TEXT NOT NULL,
  system TEXT NOT NULL, version TEXT NOT NULL, scenario TEXT NOT NULL,
  PRIMARY KEY (run_id, scenario_id)) WITHOUT ROWID;
CREATE TABLE observations (
  run_id TEXT NOT NULL REFERENCES runs(id), scenario_id TEXT NOT NULL, digest TEXT NOT NULL,
  size INTEGER NOT NULL, content BLOB,
  PRIMARY KEY (run_id, scenario_id));
CREATE TABLE results (
  run_id TEXT NOT NULL REFERENCES runs(id), scenario_id TEXT NOT NULL, system TEXT NOT NULL,
  version TEXT NOT NULL, verdict TEXT NOT NULL, signature TEXT NOT NULL, known_issue TEXT,
  duration_s REAL NOT NULL, content TEXT NOT NULL,
  PRIMARY KEY (run_id, scenario_id));
CREATE INDEX results_of_scenario ON results (scenario_id, run_id);
"""

_LATER_TABLES = """
CREATE TABLE IF NOT EXISTS elements (
  run_id TEXT NOT NULL REFERENCES runs(id), scenario_id TEXT NOT NULL, content BLOB NOT NULL,
  PRIMARY KEY (run_id, scenario_id));
CREATE TABLE IF NOT EXISTS cure_checks (
  run_id TEXT NOT NULL REFERENCES runs(id), system TEXT NOT NULL, version TEXT NOT NULL, cure TEXT NOT NULL,
  content TEXT NOT NULL, PRIMARY KEY (run_id, system, version, cure));
"""
"""What was added since the schema got its number, and what a release that does not know it can do without: it is made
in files that lack it."""

_NO_SPACE = frozenset(
    {
        sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP,
    }
)  # fmt: skip


class StoreFull(HarnessError):  # noqa: N818 (a condition of the disk, not a mistake)
    """The disk filled, or failed, under a write. What was committed before stays readable."""


@dataclass(frozen=True)
class Run:
    """One run as stored. ended_at is None while it runs, and after it was interrupted.

    command: the arguments as given. versions: distribution → release. exclusions: reason → number of
    combinations that the plan left out for it. Times are UTC, ISO 8601.
    """

    id: str
    started_at: str
    ended_at: str | None
    command: tuple[str, ...]
    seed: int
    versions: Mapping[str, str]
    exclusions: Mapping[str, int]


class Store:
    """An open results database. Any thread may call it; writes are serialised and each call is one commit.

    Raises:
        UsageError: at construction, when the file cannot be opened or is not a sound database of ours; by every
            reading method, when it turns out to be damaged.
        StoreFull: by every writing method, when there is no space left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection = _open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # --- writing, in the order of a run -------------------------------------------------------------

    def begin_run(
        self,
        command: Sequence[str],
        seed: int,
        versions: Mapping[str, str],
        exclusions: Mapping[str, int] | None = None,
        planned: Iterable[Scenario] = (),
    ) -> str:
        """Start a run, and store what it is going to execute in the same commit, so that a run which is killed leaves
        no other that planned nothing. Its id sorts by time and is unique across machines, so that shards can be
        merged."""
        begun = now()
        run_id = f"{begun[:19].translate(_STAMP)}-{secrets.token_hex(2)}"
        with self._writing() as cursor:
            cursor.execute(
                "INSERT INTO runs (id, started_at, command, seed, versions, exclusions) VALUES (?, ?, ?, ?, ?, ?)",
                (run_id, begun, _json(list(command)), seed, _json(dict(versions)), _json(dict(exclusions or {}))),
            )
            self._plan(cursor, run_id, planned)
        return run_id

    def plan(self, run_id: str, scenarios: Iterable[Scenario]) -> None:
        """Store what a run executes beyond what it has planned, all in one commit. A scenario that is planned twice is
        stored once."""
        with self._writing() as cursor:
            self._plan(cursor, run_id, scenarios)

    def _plan(self, cursor: sqlite3.Cursor, run_id: str, scenarios: Iterable[Scenario]) -> None:
        rows = (
            (run_id, position, s.id, s.system, s.version, _json(s.axis_values(only_changed=True)))
            for position, s in enumerate(scenarios)
        )
        cursor.executemany("INSERT OR IGNORE INTO planned VALUES (?, ?, ?, ?, ?, ?)", rows)

    def replan(self, run_id: str, scenarios: Iterable[Scenario]) -> None:
        """Have a run go on with these scenarios and no others, though it may have ended: what else it planned is
        dropped with its verdict, and the verdicts of the others are kept."""
        every = list(scenarios)
        kept = {scenario.id for scenario in every}
        gone = [(run_id, scenario.id) for scenario in self.planned(run_id) if scenario.id not in kept]
        with self._writing() as cursor:
            cursor.execute("UPDATE runs SET ended_at = NULL WHERE id = ?", (run_id,))
            self._plan(cursor, run_id, every)
            for table in ("planned", "results", "observations", "elements"):
                cursor.executemany(f"DELETE FROM {table} WHERE run_id = ? AND scenario_id = ?", gone)

    def observed(self, run_id: str, scenario_id: str, blob: bytes) -> None:
        """Store a scenario's packed observation; a later one of the same scenario replaces it."""
        self.observed_many(run_id, [(scenario_id, blob)])

    def observed_many(self, run_id: str, blobs: Iterable[tuple[str, bytes]]) -> None:
        """`observed` for several scenarios in one commit."""
        rows = [(run_id, key, _digest(blob), len(blob), zlib.compress(blob, 1)) for key, blob in blobs]
        with self._writing() as cursor:
            cursor.executemany("INSERT OR REPLACE INTO observations VALUES (?, ?, ?, ?, ?)", rows)

    def finished(self, run_id: str, result: Result) -> None:
        """Store a verdict."""
        self.finished_many(run_id, [result])

    def finished_many(self, run_id: str, results: Iterable[Result]) -> None:
        """`finished` for several results in one commit."""
        kept = list(results)
        rows = [
            (run_id, r.id, r.system, r.version, r.verdict.value, r.signature, r.known_issue, r.duration_s,
             _json(r.to_json()))
            for r in kept
        ]  # fmt: skip
        with self._writing() as cursor:
            cursor.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            cursor.executemany("DELETE FROM elements WHERE run_id = ? AND scenario_id = ?", [row[:2] for row in rows])
            elements = [(run_id, r.id, r.elements) for r in kept if r.elements]
            cursor.executemany("INSERT OR REPLACE INTO elements VALUES (?, ?, ?)", elements)

    def checked(self, run_id: str, checks: Iterable[CureCheck]) -> None:
        """Store what became of cures that do not apply to a head."""
        rows = [(run_id, each.system, each.version, each.cure, _json(to_plain(each))) for each in checks]
        with self._writing() as cursor:
            cursor.executemany("INSERT OR REPLACE INTO cure_checks VALUES (?, ?, ?, ?, ?)", rows)

    def prune(self, run_id: str) -> int:
        """Drop the observations of passing scenarios, keeping their digests; the number dropped."""
        with self._writing() as cursor:
            cursor.execute(
                "UPDATE observations SET content = NULL WHERE run_id = ? AND content IS NOT NULL AND scenario_id IN"
                " (SELECT scenario_id FROM results WHERE run_id = ? AND verdict = ?)",
                (run_id, run_id, Verdict.PASS.value),
            )
            return cursor.rowcount

    def end_run(self, run_id: str, at: str = "") -> None:
        """Mark a run as complete: everything planned was tried, and its reports are written. at: when; now without."""
        with self._writing() as cursor:
            cursor.execute("UPDATE runs SET ended_at = ? WHERE id = ?", (at or now(), run_id))

    # --- reading ------------------------------------------------------------------------------------

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        rows = self._read(
            "SELECT id, started_at, ended_at, command, seed, versions, exclusions FROM runs ORDER BY sequence"
        )
        with _sound(self.path):
            return [_run(*row) for row in rows]

    def run(self, run_id: str) -> Run:
        """The run with the given id.

        Raises:
            UsageError: the database holds no such run.
        """
        known = {run.id: run for run in self.runs()}
        if run_id not in known:
            raise UsageError.of(f"run in {self.path}", run_id, known or "none: the database has no run", "latest")
        return known[run_id]

    def latest_run(self) -> str | None:
        """The id of the run begun last; None in an empty database."""
        rows = self._read("SELECT id FROM runs ORDER BY sequence DESC LIMIT 1")
        return str(rows[0][0]) if rows else None

    def planned(self, run_id: str) -> list[Scenario]:
        """What a run planned, in order."""
        return self._scenarios(self._read("SELECT scenario FROM planned WHERE run_id = ? ORDER BY position", run_id))

    def unfinished(self, run_id: str) -> list[Scenario]:
        """What a run planned and has no verdict for, in order: what a resumed run executes."""
        return self._scenarios(
            self._read(
                "SELECT scenario FROM planned p WHERE run_id = ? AND NOT EXISTS (SELECT 1 FROM results r"
                " WHERE r.run_id = p.run_id AND r.scenario_id = p.scenario_id) ORDER BY position",
                run_id,
            )
        )

    def results(self, run_id: str) -> list[Result]:
        """The verdicts of a run, in the order they were planned."""
        rows = self._read(
            "SELECT r.content, e.content FROM results r LEFT JOIN planned p ON p.run_id = r.run_id AND"
            " p.scenario_id = r.scenario_id LEFT JOIN elements e ON e.run_id = r.run_id AND"
            " e.scenario_id = r.scenario_id WHERE r.run_id = ? ORDER BY p.position, r.rowid",
            run_id,
        )
        return [self._decoded(*row) for row in rows]

    def cure_checks(self, run_id: str) -> list[CureCheck]:
        """What became of cures that do not apply to a head of a run, by system and id."""
        rows = self._read("SELECT content FROM cure_checks WHERE run_id = ? ORDER BY system, version, cure", run_id)
        with _sound(self.path):
            return [from_plain(CureCheck, json.loads(content)) for (content,) in rows]

    def result(self, scenario_id: str, form: str = "shardproof replay 1a2b3c4d5e6f") -> Result:
        """The newest verdict of the scenario whose id starts with `scenario_id`; form: what an error gives as example.

        Raises:
            UsageError: no scenario of the database, or more than one, has that id.
        """
        rows = self._read(
            "SELECT r.scenario_id, r.content, e.content FROM results r JOIN runs ON runs.id = r.run_id"
            " LEFT JOIN elements e ON e.run_id = r.run_id AND e.scenario_id = r.scenario_id"
            " WHERE substr(r.scenario_id, 1, ?) = ? ORDER BY runs.sequence DESC",
            len(scenario_id), scenario_id,
        )  # fmt: skip
        matching = sorted({row[0] for row in rows})
        if len(matching) != 1:
            allowed = matching or "the id of a result, which stands behind `replay:` in the run's output and its report"
            raise UsageError.of(f"scenario in {self.path}", scenario_id, allowed, form)
        return self._decoded(*rows[0][1:])

    def observation(self, run_id: str, scenario_id: str) -> bytes | None:
        """A scenario's packed observation; None if it has none or it was pruned.

        Raises:
            HarnessError: the stored bytes are not those that were written.
        """
        rows = self._read(
            "SELECT digest, content FROM observations WHERE run_id = ? AND scenario_id = ?", run_id, scenario_id
        )
        if not rows or rows[0][1] is None:
            return None
        try:
            blob = zlib.decompress(rows[0][1])
        except zlib.error as error:
            raise HarnessError(f"{self.path}: observation of {scenario_id} does not decompress: {error}") from None
        if _digest(blob) != rows[0][0]:
            raise HarnessError(f"{self.path}: observation of {scenario_id} has another digest than was stored")
        return blob

    def before(self, run_id: str) -> dict[str, Past]:
        """For every scenario of the run: its latest verdict in an earlier run (`shardproof.store_history.before`)."""
        with _sound(self.path):
            return store_history.before(self._read, run_id)

    def shown(self, run_id: str) -> list[Shown]:
        """The outcome of every scenario that ever failed, in each run up to the given run
        (`shardproof.store_history.shown`)."""
        with _sound(self.path):
            return store_history.shown(self._read, run_id)

    # --- the connection -----------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Cursor]:
        with self._lock:
            try:
                with self._connection:
                    yield self._connection.cursor()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode in _NO_SPACE:
                    raise _full(self.path, error) from error
                raise HarnessError(f"cannot write to {self.path}: {error}") from error

    def _read(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(query, parameters).fetchall()
            except sqlite3.ProgrammingError:
                raise  # a mistake of ours, such as a call after `close`
            except sqlite3.DatabaseError as error:
                raise _damaged(self.path, error) from error

    def _decoded(self, content: str, elements: bytes | None) -> Result:
        with _sound(self.path):
            return replace(Result.from_json(json.loads(content)), elements=bytes(elements or b""))

    def _scenarios(self, rows: Iterable[tuple[Any, ...]]) -> list[Scenario]:
        with _sound(self.path):
            return [Scenario.from_axes(json.loads(row[0])) for row in rows]


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """What cannot be read from rows of the database at `path` means that it is damaged, or was edited."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise _damaged(path, error) from error


def _run(key: str, start: str, end: str | None, command: str, seed: int, versions: str, exclusions: str) -> Run:
    """A run of its row.

    Raises:
        ValueError, TypeError: a value is none that a run has.
    """
    fields_from_plain(
        Run, {"id": key, "started_at": start, "ended_at": end, "seed": seed}, ("id", "started_at", "seed")
    )
    for moment in (start, end or start):
        datetime.fromisoformat(moment)
    return Run(
        key, start, end, from_plain(tuple[str, ...], json.loads(command)), seed,
        from_plain(Mapping[str, str], json.loads(versions)), from_plain(Mapping[str, int], json.loads(exclusions)),
    )  # fmt: skip


def _full(path: Path, error: Exception) -> StoreFull:
    return StoreFull(
        f"cannot write to {path}: {error}; everything committed before is kept: free some space and resume the run"
    )


_FORM = "a path to a new file, or to one that shardproof wrote"


def _damaged(path: Path, error: Exception) -> UsageError:
    why = f"{_FORM} (this one is damaged: {type(error).__name__}: {error})"
    return UsageError.of("results database", str(path), why, "--out reports/another-folder")


def _open(path: Path) -> sqlite3.Connection:
    """A connection to a sound database of ours at `path`, created if there is no file."""
    try:
        connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    except sqlite3.OperationalError as error:
        raise UsageError.of("results database", str(path), f"{_FORM} ({error})", "--out reports/nightly") from None
    try:
        problem = _guarded(path, lambda: _problem(connection))
        problem = problem or _guarded(path, lambda: _prepare(connection))
    except BaseException:
        connection.close()
        raise
    if problem:
        connection.close()
        raise UsageError.of("results database", str(path), f"{_FORM} ({problem})", "--out reports/another-folder")
    return connection


def _guarded(path: Path, check: Callable[[], str]) -> str:
    try:
        return check()
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) in _NO_SPACE:
            raise _full(path, error) from error
        return str(error)


def _problem(connection: sqlite3.Connection) -> str:
    """Why the file cannot be used, or nothing. Reads only."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if tables and application != APPLICATION_ID:
        return "this one is the database of another program"
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        return f"this one has schema {version}, from a newer shardproof; this release writes {SCHEMA_VERSION}"
    (check,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return "" if check == "ok" else f"this one is damaged: {' '.join(check.split())}"


def _prepare(connection: sqlite3.Connection) -> str:
    """Set the journal up; create the tables in a new file."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {APPLICATION_ID};"
            f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    connection.executescript(_LATER_TABLES)
    return ""


_STAMP = str.maketrans({"-": None, ":": None, "T": "-"})


def now() -> str:
    """This moment, as the database has it: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _digest(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()[:16]
