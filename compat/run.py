"""Run the E2B SDK's own tests against Greenroom, and write down what passed.

    python compat/run.py --sdk PATH                  the whole suite against a platform started for it
    python compat/run.py --sdk PATH --only commands  a part, by pytest's -k
    python compat/run.py --sdk PATH --classify       which tests need a server: those that fail without one

PATH is a checkout of the SDK's repository (github.com/e2b-dev/E2B) or of its `packages/python-sdk`. Its tests run
with the SDK of that tree and, with `--also`, a second time with a published one. Each SDK gets a virtual environment
of its own. `needs-server.txt` lists the tests that need a server, `reasons.toml` says why some cannot pass here; a
skip counts as not passed. The result is `docs/compatibility.md` and, with `--json`, every row.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDERS = ("tests/sync", "tests/async", "tests/shared")
TOOLS = (
    "pytest>=9.0.3,<10",
    "pytest-asyncio>=1.3,<2",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.3.1,<4",
    "pytest-dotenv>=0.5.2,<0.6",
    "python-dotenv>=1,<2",
)
"""What the tree's own development group names."""
PLUGINS = ("-p", "recorder", "-p", "no:cacheprovider")
KEY = "e2b_" + "0" * 40


def tree_of(path: Path) -> Path:
    """The python-sdk folder of a checkout. Ends the program when there is none."""
    for candidate in (path, path / "packages" / "python-sdk"):
        if (candidate / "e2b" / "__init__.py").is_file() and (candidate / "tests").is_dir():
            return candidate.resolve()
    sys.exit(
        f"{path} is no checkout of the E2B SDK: neither it nor its packages/python-sdk has e2b/ and tests/"
    )


def environment(sdk: str, name: str) -> Path:
    """The Python of a virtual environment with `sdk` (a path or a requirement) and the test tools in it."""
    folder = ROOT / ".compat" / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = json.dumps([sdk, *TOOLS])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"installing {name} into {folder.relative_to(ROOT)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", sdk, *TOOLS], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def version_of(python: Path) -> str:
    """The version of the SDK that is installed beside this Python."""
    code = "import importlib.metadata; print(importlib.metadata.version('e2b'))"
    return subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def run_tests(
    python: Path, tree: Path, variables: dict[str, str], arguments: list[str]
) -> list[dict[str, Any]]:
    """Run the suite's server folders; a row for each test."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as record:
        done = subprocess.run(
            [str(python), "-m", "pytest", "-q", *PLUGINS, "--tb=native", *arguments, *FOLDERS],
            cwd=tree,
            env={
                **inherited,
                **variables,
                "PYTHONPATH": str(HERE),
                "PYTHONDONTWRITEBYTECODE": "1",
                "COMPAT_RECORD": record.name,
            },
            check=False,
        )
        if done.returncode not in (0, 1):
            sys.exit(f"pytest ended with status {done.returncode}")
        with open(record.name, encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def greenroom(state: Path, *arguments: str) -> str:
    """Run the command line of this checkout."""
    command = [sys.executable, "-m", "greenroom.cli.main", "--state-dir", str(state), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def alone(tree: Path) -> Iterator[Path]:
    """The tree without its own SDK, whose folder would come before the one that is installed."""
    with tempfile.TemporaryDirectory(prefix="greenroom-compat-") as directory:
        shutil.copytree(tree, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("e2b", "e2b_*"))
        yield Path(directory)


@contextlib.contextmanager
def platform(options: list[str]) -> Iterator[dict[str, str]]:
    """A platform on a state directory of its own; gives the variables that `greenroom env` prints."""
    with tempfile.TemporaryDirectory(prefix="greenroom-compat-") as directory:
        state = Path(directory) / "state"
        greenroom(state, "up", "--detach", "--port", "0", "--tls-port", "0", *options)
        try:
            plain, tls = (json.loads(greenroom(state, "env", "--json", *more)) for more in ((), ("--tls",)))
            # The API and the agent by their plain addresses, what is opened by name by HTTPS.
            yield {**plain, "SSL_CERT_FILE": tls["SSL_CERT_FILE"], "COMPAT_DOMAIN": tls["E2B_DOMAIN"]}
        finally:
            greenroom(state, "down")


def needing() -> set[str]:
    """The tests that need a server."""
    text = (HERE / "needs-server.txt").read_text(encoding="utf-8")
    return {line for line in text.splitlines() if line and not line.startswith("#")}


def classify(tree: Path) -> None:
    """Write `needs-server.txt`: run everything with no server behind it, and keep what fails."""
    python = environment(str(tree), "tree")
    variables = {"E2B_API_KEY": KEY, "E2B_DOMAIN": "sandbox.invalid", "E2B_CONNECTION_RETRIES": "0"}
    rows = run_tests(python, tree, variables, ["-n", "2", "--timeout", "15"])
    failed = sorted(row["test"] for row in rows if row["outcome"] == "failed")
    head = (
        f"# Tests of the E2B Python SDK {version_of(python)} that need a server: all that fail without one.\n"
        "# Written by compat/run.py --classify.\n"
    )
    (HERE / "needs-server.txt").write_text(head + "\n".join(failed) + "\n", encoding="utf-8")
    print(f"{len(failed)} of {len(rows)} tests need a server")


def reasons() -> list[dict[str, Any]]:
    """Why some tests cannot pass: `tests` (patterns of node ids) and `why`, the first that fits counts."""
    return list(tomllib.loads((HERE / "reasons.toml").read_text(encoding="utf-8"))["reason"])


def why(row: dict[str, Any], known: list[dict[str, Any]]) -> str:
    """The reason written down for a test that did not pass, else its own error."""
    for entry in known:
        if any(fnmatch.fnmatch(row["test"], pattern) for pattern in entry["tests"]):
            return str(entry["why"])
    return f"`{row['why'].replace('|', '/').replace('`', chr(39))}`"


def report(results: dict[str, list[dict[str, Any]]], machine: str) -> str:
    """The page for people."""
    known = reasons()
    lines = [
        "# Compatibility with the E2B SDK",
        "",
        "The server tests of the E2B Python SDK's own suite (github.com/e2b-dev/E2B, `packages/python-sdk/tests`), run",
        "against `greenroom up` with real microVMs. This page is written by `make compat SDK=PATH`. A skip counts as",
        "not passed.",
        "",
        machine,
        "",
    ]
    for version, rows in results.items():
        passed = sum(row["outcome"] == "passed" for row in rows)
        title = f"## With e2b {version}: {passed} of {len(rows)} pass"
        lines += [title, "", "| file | passed | not passed |", "|---|---|---|"]
        files: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for row in rows:
            files[row["test"].partition("::")[0].removeprefix("tests/")].append(row)
        for file in sorted(files):
            good = sum(row["outcome"] == "passed" for row in files[file])
            lines.append(f"| {file} | {good} | {len(files[file]) - good or ''} |")
        lines += ["", "Not passed, and why:", ""]
        causes: dict[str, list[str]] = collections.defaultdict(list)
        for row in rows:
            if row["outcome"] != "passed":
                causes[why(row, known)].append(row["test"].removeprefix("tests/"))
        for cause in sorted(causes, key=lambda each: (-len(causes[each]), each)):
            lines.append(f"- {cause} ({len(causes[cause])})")
            lines += [f"  - {test}" for test in sorted(causes[cause])]
        lines.append("")
    return "\n".join(lines)


def conditions() -> str:
    """The machine in one line."""
    qemu = subprocess.run(
        ["qemu-system-x86_64", "--version"], check=False, capture_output=True, text=True
    ).stdout
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{today}, {os.cpu_count()} CPUs, Linux {os.uname().release}, {qemu.splitlines()[0] if qemu else 'no QEMU'}."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--sdk", type=Path, required=True, help="checkout of the SDK")
    parser.add_argument(
        "--also", default="", metavar="VERSION", help="run them with this published version too"
    )
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="tests at the same time (default 2)"
    )
    parser.add_argument("--warm", type=int, default=6, metavar="N", help="sandboxes kept warm (default 6)")
    parser.add_argument("--up", default="", metavar="OPTIONS", help="more options for `greenroom up`")
    parser.add_argument("--out", type=Path, default=None, help="write the page to this file")
    parser.add_argument("--json", type=Path, default=None, help="write every row to this file")
    parser.add_argument("--classify", action="store_true", help="write needs-server.txt anew instead")
    arguments = parser.parse_args()
    tree = tree_of(arguments.sdk)
    if arguments.classify:
        classify(tree)
        return 0
    wanted = needing()
    # One process needs no workers: they would only be more of them beside the emulated guests.
    workers = [] if arguments.workers == 1 else ["-n", str(arguments.workers)]
    selection = workers + (["-k", arguments.only] if arguments.only else [])
    results: dict[str, list[dict[str, Any]]] = {}
    sdks = [(str(tree), "tree")] + (
        [(f"e2b=={arguments.also}", f"e2b-{arguments.also}")] if arguments.also else []
    )
    for sdk, name in sdks:
        python = environment(sdk, name)
        options = ["--warm", str(arguments.warm), *arguments.up.split()]
        with alone(tree) as tests, platform(options) as variables:
            rows = run_tests(python, tests, variables, selection)
        version = version_of(python)
        results[version] = [row for row in rows if row["test"] in wanted]
        if not arguments.only:
            seen = {row["test"] for row in rows}
            results[version] += [
                {"test": test, "outcome": "missing", "seconds": 0.0, "why": "it was not collected"}
                for test in sorted(wanted - seen)
            ]
    page = report(results, conditions())
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(page, encoding="utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    for version, rows in results.items():
        print(f"e2b {version}: {sum(row['outcome'] == 'passed' for row in rows)} of {len(rows)} pass")
    return 0


if __name__ == "__main__":
    sys.exit(main())
