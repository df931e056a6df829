"""Download Debian's packages of servers and unpack them here: nothing is installed or started.

    python tests/kit/servers/fetch.py FOLDER

Where there is no apt, it says so and leaves the folder empty: tests of those servers are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

MARIADB = ["mariadb-server-core", "mariadb-client-core", "liburing2", "libaio1"]
ETCD = ["etcd-server"]
PGBOUNCER = ["pgbouncer", "libc-ares2", "libevent-2.1-7"]
ZOOKEEPER = [
    *("zookeeper", "libzookeeper-java", "libslf4j-java", "libsnappy-java", "libnetty-java"),
    *("libdropwizard-metrics-java", "libjetty9-java", "libcommons-cli-java", "libcommons-io-java"),
    *("libjackson2-core-java", "libjackson2-databind-java", "libjackson2-annotations-java"),
    "libfindbugs-annotations-java",
]
# Of all that Debian has of MySQL there is one suite that has its server. Whatever that is made for
# is newer than what this machine has, so it brings its own libraries, down to that of C.
MYSQL, MYSQL_SUITE = "mysql-server-core", "sid"
_MYSQL_PARTS = ("usr/sbin/mysqld", "usr/share/mysql", "usr/lib")
_KEYRINGS = ("debian-archive-keyring.pgp", "debian-archive-keyring.gpg")


def main(folder: Path) -> None:
    """Fill the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not all(map(shutil.which, ("apt-get", "dpkg"))):
        print("no apt here: MariaDB, etcd, ZooKeeper and PgBouncer are tested only if installed")
        print("no apt here: MySQL is not tested")
        return
    downloads = folder / "downloads"
    downloads.mkdir(exist_ok=True)
    for names in (MARIADB, ETCD, PGBOUNCER, ZOOKEEPER):
        if not download(names, downloads, []) and not download(names, downloads, private(folder)):
            print(f"apt could not bring {', '.join(names)}: these are tested only if installed")
    for package in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    shutil.rmtree(downloads)
    fetch_mysql(folder / "mysql")


def download(names: list[str], downloads: Path, options: list[str]) -> bool:
    """Have apt download packages; say whether it did."""
    words = ["apt-get", *options, "-qq", "download", *names]
    return subprocess.run(words, cwd=downloads, check=False, capture_output=True).returncode == 0


def private(folder: Path) -> list[str]:
    """Return options for a list of packages of our own, and bring it up to date."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    subprocess.run(["apt-get", *options, "-qq", "update"], check=False, capture_output=True)
    return options


def fetch_mysql(folder: Path) -> None:
    """Unpack MySQL and all that it depends on, which apt finds out, into a folder of its own."""
    work = folder.with_name("mysql-downloads")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    options = another_suite(work)
    words = ["apt-get", *options, "-qqy", "--no-install-recommends", "--download-only"]
    fetched = subprocess.run([*words, "install", MYSQL], check=False, capture_output=True)
    whole = work / "whole"
    for package in (work / "cache/archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(whole)], check=True)
    if fetched.returncode == 0:
        for part in _MYSQL_PARTS:
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            (whole / part).rename(folder / part)
    else:
        print(f"apt could not bring {MYSQL} of {MYSQL_SUITE}: MySQL is not tested")
        print(fetched.stderr.decode(errors="replace").strip())
    shutil.rmtree(work)


def another_suite(work: Path) -> list[str]:
    """Return options for an apt that sees one suite only, from where this machine has its own.

    For this apt nothing is installed, so that it brings every library. Archives that have no such
    suite (that of security has none) are passed over.
    """
    for part in ("lists/partial", "cache/archives/partial"):
        (work / part).mkdir(parents=True)
    status, sources = work / "status", work / "sources.list"
    status.touch()
    trusted = [path for name in _KEYRINGS if (path := Path("/usr/share/keyrings") / name).exists()]
    signed = f"[signed-by={trusted[0]}] " if trusted else ""
    sources.write_text(
        "".join(f"deb {signed}{archive} {MYSQL_SUITE} main\n" for archive in archives())
    )
    places = {
        "Dir::State": work,
        "Dir::State::Lists": work / "lists",
        "Dir::State::Status": status,
        "Dir::Cache": work / "cache",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Acquire::Languages": "none",
    }
    options = [word for name, where in places.items() for word in ("-o", f"{name}={where}")]
    subprocess.run(["apt-get", *options, "-qq", "update"], check=False, capture_output=True)
    return options


def archives() -> list[str]:
    """Return where this machine's apt gets its packages from, also if it never did so yet."""
    words = ["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)"]
    found = subprocess.run(words, check=False, capture_output=True, text=True).stdout
    return sorted(set(found.split()))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
