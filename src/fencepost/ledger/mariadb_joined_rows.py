"""What the MariaDB ledger says to its server in a transaction that user code joins.

What is only looked at is looked at by a plain SELECT: a subquery in any other statement would lock
what it reads until the commit, and a run whose row is locked cannot be kept alive.
"""

from __future__ import annotations

from fencepost.ledger.mariadb_leases import HELD, OWNED
from fencepost.ledger.mariadb_rows import KEY, OURS
from fencepost.ledger.mariadb_said import NOW, said

# How long the commit waits for the run, and then for its lease, in seconds.
SEALED_WITHIN = 4

# MariaDB has a limit for a transaction in which nothing is asked, MySQL one for a session. That of
# a statement is for SELECT only on MySQL, in milliseconds. Locks of user code are waited for as
# the server has it, but not for less time than it takes until whoever was stopped inside of a
# transaction has lost them.
# What the last one may have changed on this session is as it was: under SERIALIZABLE a look locks.
LIMITS = said(
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
    """
SET SESSION innodb_lock_wait_timeout =
        CAST(GREATEST(@@GLOBAL.innodb_lock_wait_timeout, :patient) AS UNSIGNED)
    /*M!100300 , idle_transaction_timeout = :idle, max_statement_time = :longest */
    /*!80000 , wait_timeout = :idle, max_execution_time = CAST(:longest * 1000 AS UNSIGNED) */""",
)
HURRY = said(f"""
SET SESSION innodb_lock_wait_timeout = {SEALED_WITHIN} /*M!100300 , max_statement_time = 0 */
    /*!80000 , max_execution_time = 0 */""")

# Which server this is: one that took over may know less, and may learn it later.
_SERVER = "CONCAT_WS(':', @@hostname, @@port, @@server_id, @@datadir)"

GUARD = said(f"""
SELECT run.cancel_at, EXISTS (SELECT 1 FROM fencepost_lease AS lease WHERE {HELD}),
       CONNECTION_ID(), {_SERVER}, SUBSTRING_INDEX(run.sealed, ' ', 1)
  FROM fencepost_run AS run
 WHERE {OURS}""")

# How the tables of one name are kept.
ENGINES = "SELECT engine FROM information_schema.tables WHERE table_name = %s"

# How many characters there are for the names of transactions that were committed, newest first.
_ROOM = 255

# A lease that ended, and that nobody has taken, is still ours to commit under: whoever takes it
# from now on waits for us. The run's row tells which transactions were committed for it.
SEAL = said(
    f"""
UPDATE fencepost_run AS run
   SET run.sealed = LEFT(CONCAT(:xid, ' ', run.sealed), {_ROOM}), run.edition = run.edition + 1
 WHERE {OURS}""",
    "SET @fencepost_insists = EXP(710 * (ROW_COUNT() <> 1))",
    f"""
SELECT EXP(710 * (COUNT(*) <> 1)) INTO @fencepost_insists
  FROM fencepost_lease AS lease
 WHERE {OWNED} AND lease.held = 1
   FOR UPDATE""",
    f"SELECT run.cancel_at FROM fencepost_run AS run WHERE {KEY}",
)

STANDS = said(f"""
SELECT EXISTS (SELECT 1 FROM fencepost_lease AS lease WHERE {OWNED} AND lease.held = 1)
  FROM fencepost_run AS run
 WHERE {OURS}""")

# A session leaves this list after its transaction has ended, one way or the other.
WAIT = said("DO SLEEP(:pause)")
LIVES = said(f"""
SELECT COUNT(*), {_SERVER} FROM information_schema.processlist WHERE id = :number""")
# Who is not among the newest was not committed, if all are there that came since it began: there is
# room for more, or the one that was the newest then is still among them. Else nobody can tell.
FATE = said(f"""
SELECT CASE WHEN LOCATE(:xid, run.sealed) > 0 THEN TRUE
            WHEN CHAR_LENGTH(run.sealed) < {_ROOM} THEN FALSE
            WHEN :newest <> '' AND LOCATE(:newest, run.sealed) > 0 THEN FALSE END
  FROM fencepost_run AS run
 WHERE {KEY}""")

# Done at once: begin and end commit together. An item is new if it is the one of this call.
_PLACE = "item.namespace = :namespace AND item.place = :place"
ONCE = said(
    f"""
SELECT EXISTS (SELECT 1 FROM fencepost_run AS run WHERE {OURS}) INTO @fencepost_ours""",
    f"""
INSERT INTO fencepost_item
       (namespace, place, shelf, scope, item, state, token, run, `call`, `at`)
SELECT :namespace, :place, :shelf, :scope, :item, 'done', :token, :run, :call, {NOW}
  FROM DUAL
 WHERE @fencepost_ours
    ON DUPLICATE KEY UPDATE place = VALUES(place)""",
    f"""
SELECT @fencepost_ours,
       EXISTS (SELECT 1 FROM fencepost_item AS item
                WHERE {_PLACE} AND item.run = :run AND item.token = :token AND item.`call` = :call)
  FROM DUAL""",
)

ONCE_MORE = said(f"""
UPDATE fencepost_item AS item
   SET item.state = 'done', item.token = :token, item.run = :run, item.`call` = :call,
       item.`at` = {NOW}, item.error = NULL
 WHERE {_PLACE}""")
