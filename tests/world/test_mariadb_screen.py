"""What a connection refuses to send is what would end its transaction, as the server has it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from pymysql.constants import CLIENT

from fencepost.world.mariadb_screen import ends_transaction
from mariaplace import LoggedMariaDB
from servers import shared

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING = r"""
    ALTER DATABASE CHARACTER SET utf8mb4
    ALTER EVENT nowhere COMMENT 'x'
    ALTER FUNCTION nowhere COMMENT 'x'
    ALTER PROCEDURE nowhere COMMENT 'x'
    ALTER SEQUENCE nowhere INCREMENT 2
    ALTER SERVER nowhere OPTIONS (USER 'x')
    ALTER TABLE known COMMENT 'x'
    ALTER TABLE passing COMMENT 'x'
    ALTER TABLE nowhere ADD n INT
    ALTER USER nobody ACCOUNT UNLOCK
    ALTER VIEW nowhere AS SELECT 2
    ANALYZE LOCAL TABLE known
    ANALYZE NO_WRITE_TO_BINLOG TABLES known
    ANALYZE TABLE known
    BACKUP LOCK known
    BACKUP STAGE END
    BACKUP UNLOCK
    BEGIN
    BEGIN WORK
    CHECK TABLE known
    CHECK VIEW nowhere
    COMMIT
    COMMIT AND CHAIN
    COMMIT WORK
    CREATE DATABASE IF NOT EXISTS screened
    CREATE FUNCTION nowhere RETURNS STRING SONAME 'nowhere.so'
    CREATE INDEX nowhere ON nowhere (n)
    CREATE INDEX passing_n ON passing (n)
    CREATE OR REPLACE DEFINER = CURRENT_USER VIEW looked AS SELECT 1
    CREATE OR REPLACE TABLE other (n INT)
    CREATE OR REPLACE VIEW looked AS SELECT 1
    CREATE PROCEDURE IF NOT EXISTS idle() DO 1
    CREATE ROLE IF NOT EXISTS nobodies
    CREATE SEQUENCE IF NOT EXISTS counted
    CREATE TABLE IF NOT EXISTS known (n INT)
    CREATE TABLE known SELECT 1 AS n
    CREATE TEMPORARY SEQUENCE passing_counted
    CREATE TRIGGER nowhere BEFORE INSERT ON nowhere FOR EACH ROW SET @x = 1
    CREATE UNIQUE INDEX nowhere ON nowhere (n)
    CREATE USER IF NOT EXISTS nobody
    DROP DATABASE IF EXISTS nowhere
    DROP EVENT IF EXISTS nowhere
    DROP FUNCTION IF EXISTS nowhere
    DROP INDEX IF EXISTS nowhere ON passing
    DROP PROCEDURE IF EXISTS nowhere
    DROP ROLE IF EXISTS nowhere
    DROP SEQUENCE IF EXISTS nowhere
    DROP SERVER IF EXISTS nowhere
    DROP TABLE IF EXISTS nowhere
    DROP TABLE passing
    DROP TRIGGER IF EXISTS nowhere
    DROP USER IF EXISTS nowhere
    DROP VIEW IF EXISTS nowhere
    FLUSH LOCAL STATUS
    FLUSH TABLES known FOR EXPORT
    GRANT SELECT ON known TO nobody
    INSTALL PLUGIN nowhere SONAME 'nowhere'
    INSTALL SONAME 'nowhere'
    LOCK TABLE known READ
    LOCK TABLES known WRITE
    OPTIMIZE TABLE known
    RENAME TABLE nowhere TO nowhere_else
    RENAME USER nowhere TO nowhere_else
    REPAIR TABLE known
    RESET QUERY CACHE
    REVOKE ALL, GRANT OPTION FROM nobody
    ROLLBACK
    ROLLBACK AND CHAIN
    ROLLBACK WORK
    SET @@`autocommit` = 1
    SET @@autocommit = 1
    SET @@session.autocommit = 1
    SET @x = 1, autocommit = ON
    SET DEFAULT ROLE NONE
    SET LOCAL autocommit = 1
    SET PASSWORD FOR nobody = ''
    SET STATEMENT max_statement_time = 1 FOR COMMIT
    SET STATEMENT max_statement_time = 1 FOR CREATE TABLE IF NOT EXISTS known (n INT)
    SET `autocommit` = 1
    SET autocommit = DEFAULT
    SET autocommit := 1
    START TRANSACTION
    START TRANSACTION READ ONLY
    TRUNCATE TABLE passing
    TRUNCATE known
    UNINSTALL PLUGIN nowhere
    UNINSTALL SONAME 'nowhere'
    /* a */ commit /* b */
    /**/COMMIT
    /*!*/COMMIT
    /*! COMMIT /* a */ */
    /*!40000COMMIT*/
    /*M!100100 COMMIT */
    CREATE /*!99999 TEMPORARY */ TABLE other (n INT)
    CREATE /* TEMPORARY */ TABLE IF NOT EXISTS known (n INT)
    -- a\nCOMMIT
    #a\nCOMMIT
    \n\tCOMMIT;
    SELECT 1; COMMIT
    SELECT 1, 2, 3 /* ; */; SELECT 1, 2, 3 -- ;\n ; COMMIT
    SELECT 'a\'', "b"" ", `n;` FROM (SELECT 1 AS `n;`) AS x; COMMIT
    SELECT '\\'; COMMIT -- '
    SELECT 4 --2, 3, 4, 5; COMMIT
    BEGIN NOT ATOMIC SELECT 1; COMMIT; END
"""

KEEPING = r"""
    (SELECT 1)
    ANALYZE FORMAT=JSON SELECT 1
    ANALYZE SELECT 1
    ANALYZE UPDATE known SET n = 1
    BEGIN NOT ATOMIC BEGIN SELECT 1; END; BEGIN SELECT 1; END; END
    CACHE INDEX known IN default
    CHECKSUM TABLE known
    CREATE OR REPLACE TEMPORARY TABLE passing_too (n INT)
    CREATE TEMPORARY TABLE passing_too LIKE known
    CREATE TEMPORARY TABLE passing_too SELECT 1 AS n
    CREATE /* a */ TEMPORARY TABLE IF NOT EXISTS passing (n INT)
    DELETE FROM known
    DESCRIBE known
    DO 1
    DROP PREPARE nothing
    DROP TEMPORARY SEQUENCE IF EXISTS nowhere
    DROP TEMPORARY TABLE passing
    EXPLAIN SELECT 1
    HANDLER known OPEN
    IF 1 THEN SELECT 1; END IF
    INSERT INTO known VALUES (1) ON DUPLICATE KEY UPDATE n = 1
    LOAD INDEX INTO CACHE known
    PREPARE nothing FROM 'SELECT 1'
    RELEASE SAVEPOINT own
    REPLACE INTO known VALUES (1)
    ROLLBACK TO SAVEPOINT own
    ROLLBACK TO own
    ROLLBACK WORK TO own
    SAVEPOINT own
    SELECT 'COMMIT; COMMIT' AS `; COMMIT`
    SELECT 'a\'; COMMIT -- '
    SELECT 'a''; COMMIT -- '
    SELECT * FROM known FOR UPDATE
    SELECT 1 -- ; COMMIT
    SELECT 1 /* ; COMMIT */ # ; COMMIT
    SELECT 1; SELECT 2;
    SELECT REPEAT('x', 10) INTO @x
    SET @autocommit = 1
    SET @x = @@autocommit = 1
    SET @x = 'autocommit', @y = 'SET autocommit = 1'
    SET GLOBAL autocommit = 1
    SET @@global.autocommit = 1
    SET ROLE NONE
    SET SESSION TRANSACTION READ WRITE
    SET STATEMENT max_statement_time = 1 FOR SELECT 1
    SET autocommit = 'off'
    SET autocommit = 0
    SET autocommit = false, @x = 1
    SHOW CREATE TABLE known
    START SLAVE
    STOP SLAVE
    UNLOCK TABLES
    UPDATE known SET n = 2
    USE mysql
    VALUES (1)
    WITH a AS (SELECT 1) SELECT * FROM a
    XA BEGIN 'x'
    XA COMMIT 'x' ONE PHASE
    XA RECOVER
    XA ROLLBACK 'x'
    XA START 'x'
"""


def listed(text: str) -> list[str]:
    lines = [line.strip() for line in text.strip().splitlines()]
    return [line.replace("\\n", "\n").replace("\\t", "\t") for line in lines]


@pytest.fixture(scope="module")
def server() -> LoggedMariaDB:
    server = shared(LoggedMariaDB)
    server.database("screen")
    for statement in (
        "CREATE TABLE IF NOT EXISTS known (n INT)",
        "CREATE USER IF NOT EXISTS nobody",
    ):
        server.run(statement, database="screen")
    return server


@pytest.fixture
def cursor(server: LoggedMariaDB) -> Iterator[Any]:
    connection: Any = pymysql.connect(
        unix_socket=str(server.socket),
        user="root",
        database="screen",
        ssl_disabled=True,
        client_flag=CLIENT.MULTI_STATEMENTS,
        init_command="CREATE TEMPORARY TABLE passing (n INT); PREPARE nothing FROM 'DO 1'",
    )
    with closing(connection):
        yield connection.cursor()


def outlives(cursor: Any, statement: str) -> bool:
    """Say whether a transaction goes on after a statement, whatever that is answered with."""
    cursor.execute("START TRANSACTION; SAVEPOINT here; INSERT INTO known VALUES (7); SAVEPOINT own")
    try:
        cursor.execute(statement)
        while cursor.nextset():
            pass
    except pymysql.Error as error:
        assert error.args[0] != 1064, statement  # it was not even read  # noqa: PT017
    try:
        cursor.execute("RELEASE SAVEPOINT here; ROLLBACK")
    except pymysql.Error as error:
        assert error.args[0] == 1305  # noqa: PT017
        return False
    return True


@pytest.mark.parametrize("statement", listed(ENDING))
def test_what_ends_a_transaction_on_the_server_is_known_by_its_text(
    cursor: Any, statement: str
) -> None:
    assert not outlives(cursor, statement)
    assert ends_transaction(statement)


@pytest.mark.parametrize("statement", listed(KEEPING))
def test_what_a_transaction_outlives_is_not_refused(cursor: Any, statement: str) -> None:
    assert outlives(cursor, statement)
    assert not ends_transaction(statement)


@pytest.mark.parametrize(
    "statement", ["/*!80000 COMMIT */", "/*M!999999 COMMIT */", "SELECT 1 /*!80000 ; COMMIT */"]
)
def test_what_only_some_versions_read_counts_on_all_of_them(cursor: Any, statement: str) -> None:
    assert outlives(cursor, statement)
    assert ends_transaction(statement)


def test_a_backslash_is_one_where_the_session_has_it_so(cursor: Any) -> None:
    cursor.execute("SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'")
    statement = r"SELECT 'a\'; COMMIT -- '"
    assert not outlives(cursor, statement)
    assert ends_transaction(statement, backslashes=False)
    assert not ends_transaction(statement)


@pytest.mark.parametrize(
    "statement",
    ["CALL idle()", "EXECUTE nothing", "EXECUTE IMMEDIATE 'COMMIT'", "", ";", "'", "/*"],
)
def test_what_cannot_be_known_by_its_text_passes(statement: str) -> None:
    assert not ends_transaction(statement)


def test_a_text_of_megabytes_is_read_to_its_end() -> None:
    rows = ", ".join(f"({n}, 'it''s; /* {n} \\' */')" for n in range(50_000))
    assert not ends_transaction(f"INSERT INTO effect VALUES {rows}")
    assert ends_transaction(f"INSERT INTO effect VALUES {rows}; COMMIT")
