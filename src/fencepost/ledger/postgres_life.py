"""Which ledger a PostgreSQL database has: a random name that it got when it was made.

A copy has the same name, and lacks what was committed since. Whoever notices that writes a doubt
beside the name, where everybody who wants to have something run comes by.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import RUN_KEY
from fencepost.ledger.postgres_said import NOW, said
from fencepost.ledger.retention import KEPT_FOR

CREATE_LIFE = """
CREATE TABLE IF NOT EXISTS fencepost_life (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    incarnation TEXT    NOT NULL,
    accepted_us BIGINT  NOT NULL,
    doubt       TEXT    NOT NULL
)"""

BEGIN_LIFE = """
INSERT INTO fencepost_life (id, incarnation, accepted_us, doubt)
SELECT 1, encode(substring(sha256(convert_to(
           random()::text || random()::text || clock_timestamp()::text || pg_backend_pid()::text,
           'UTF8')) FROM 1 FOR 16), 'hex'), 0, ''
    ON CONFLICT DO NOTHING"""


def has(prefix: str = "") -> str:
    """Return, as a condition, whether a commit is in it that was seen before, or later ones of it.

    Those are another claim of the same run, or a cancel that took its token. What is too old to be
    kept may be gone. The values are named with a prefix.
    """
    job, slot, manual, rerun, token, starts, ended = (
        f":{prefix}{name}" for name in (*RUN_KEY, "token", "starts", "ended")
    )
    return f"""(
       {token}::bigint = 0
       OR EXISTS (SELECT 1 FROM fencepost_run
                   WHERE namespace = :namespace AND job = {job} AND slot = {slot}
                     AND manual = {manual} AND rerun = {rerun}
                     AND ((token > {token}::bigint
                           AND (starts > {starts}::bigint OR state = 'cancelled'))
                          OR (token = {token}::bigint AND NOT ({ended} AND state = 'running'))))
       OR EXISTS (SELECT 1 FROM fencepost_job
                   WHERE namespace = :namespace AND job = {job} AND pruned >= {slot})
       OR ({manual}::bigint <> 0 AND {slot} < {NOW} - {KEPT_FOR}))"""


# Whether there is any run matters only where it is another ledger.
FIND_LIFE = said(f"""
SELECT incarnation, accepted_us, doubt,
       CASE WHEN incarnation = :incarnation THEN FALSE
            ELSE (SELECT job FROM fencepost_run WHERE namespace = :namespace
                   ORDER BY job LIMIT 1) IS NULL END,
       {has()}
  FROM fencepost_life
 WHERE id = 1""")

# Nobody has any doubt, and it is as it was when it was last seen: then there is no reason to.
AS_SEEN = f"""
    SELECT 1 FROM fencepost_life
     WHERE id = 1 AND incarnation = :incarnation AND accepted_us = :accepted AND doubt = ''
       AND {has("seen_")}"""

# Not over an operator's word that came meanwhile.
DOUBT = said("""
UPDATE fencepost_life SET doubt = :why WHERE id = 1 AND accepted_us = :accepted AND doubt = ''""")

ACCEPT = said("""
UPDATE fencepost_life
   SET doubt = '',
       accepted_us = greatest(accepted_us + 1,
                              (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
 WHERE id = 1""")
