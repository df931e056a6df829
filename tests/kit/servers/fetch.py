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


def main(folder: Path) -> None:
    """Fill the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not all(map(shutil.which, ("apt-get", "dpkg"))):
        print("no apt here: MariaDB, etcd, ZooKeeper and PgBouncer are tested only if installed")
        return
    downloads = folder / "downloads"
    downloads.mkdir(exist_ok=True)
    for names in (MARIADB, ETCD, PGBOUNCER, ZOOKEEPER):
        if not download(names, downloads, []) and not download(names, downloads, private(folder)):
            print(f"apt could not bring {', '.join(names)}: these are tested only if installed")
    for package in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    shutil.rmtree(downloads)


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


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
