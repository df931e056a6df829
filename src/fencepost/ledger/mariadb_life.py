"""Which ledger a MariaDB database has: a random name that it got when it was made.

A copy has the same name, and lacks what was committed since. Whoever notices that writes a doubt
beside the name, where everybody who wants to have something run comes by.
"""

from __future__ import annotations

from fencepost.ledger.mariadb_said import NOW, NOW_US, said
from fencepost.ledger.retention import KEPT_FOR

CREATE_LIFE = """
CREATE TABLE IF NOT EXISTS fencepost_life (
    id          INT    NOT NULL PRIMARY KEY,
    incarnation VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    accepted_us BIGINT NOT NULL,
    doubt       TEXT   CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL
) ENGINE = InnoDB"""

BEGIN_LIFE = f"""
INSERT IGNORE INTO fencepost_life (id, incarnation, accepted_us, doubt)
SELECT 1, LEFT(SHA2(CONCAT_WS(' ', RAND(), RAND(), UUID(), {NOW_US}, CONNECTION_ID()), 256), 32),
       0, ''"""

_RUN = """namespace = :namespace
                     AND job = :job AND slot = :slot AND `manual` = :manual AND rerun = :rerun"""

# Beside which one it is: whether a commit is in it that was seen before, or later ones of the same
# run: another claim, or a cancel that took its token. What is too old to be kept
# may be gone; and whether there is any run matters only where it is another ledger.
FIND_LIFE = said(f"""
SELECT incarnation, accepted_us, doubt,
       IF(incarnation = :incarnation, FALSE,
          NOT EXISTS (SELECT 1 FROM fencepost_run WHERE namespace = :namespace)),
       :token = 0
       OR EXISTS (SELECT 1 FROM fencepost_run
                   WHERE {_RUN}
                     AND ((token > :token AND (starts > :starts OR state = 'cancelled'))
                          OR (token = :token AND NOT (:ended AND state = 'running'))))
       OR EXISTS (SELECT 1 FROM fencepost_job
                   WHERE namespace = :namespace AND job = :job AND pruned >= :slot)
       OR (:manual <> 0 AND :slot < {NOW} - {KEPT_FOR})
  FROM fencepost_life
 WHERE id = 1""")

# Not over an operator's word that came meanwhile.
DOUBT = said("""
UPDATE fencepost_life SET doubt = :why WHERE id = 1 AND accepted_us = :accepted AND doubt = ''""")

ACCEPT = said(f"""
UPDATE fencepost_life
   SET doubt = '', accepted_us = GREATEST(accepted_us + 1, {NOW_US})
 WHERE id = 1""")
