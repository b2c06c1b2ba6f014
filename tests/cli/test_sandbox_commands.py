"""`env`, `run`, `exec`, `demo` and `keys` against the stand-in entry, which runs commands as local processes."""

from __future__ import annotations

import json
import shlex
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from greenroom.cli.processes import ProcessId

from .conftest import DEADLINE, Home, eventually

pytestmark = pytest.mark.slow


def notes(home: Home) -> list[str]:
    return home.journal.read_text(encoding="utf-8").splitlines() if home.journal.exists() else []


def kept_sandbox(home: Home) -> str:
    """Id of a sandbox that stays; what was noted of its making is forgotten."""
    sandbox = home.run("run", "--keep", "--", "true").stderr.split()[2]
    home.journal.unlink()
    return sandbox


def test_env_prints_what_a_shell_needs(home: Home) -> None:
    home.up()
    printed = home.ok("env")
    script = (
        printed
        + 'printf "%s\\n" "$E2B_API_KEY" "$E2B_API_URL" "$E2B_SANDBOX_URL" "$E2B_DOMAIN" "${E2B_DEBUG-unset}"'
    )
    shell = subprocess.run(
        ["sh", "-c", script], env={"E2B_DEBUG": "true"}, capture_output=True, text=True, check=True
    )
    key, api, sandbox, domain, debug = shell.stdout.split()
    _code, seen = home.status()
    assert (api, sandbox, domain, debug) == (seen.entry_url, seen.entry_url, seen.domain, "unset")
    assert key == home.state.default_key.read_text(encoding="utf-8").strip()
    assert json.loads(home.ok("env", "--json"))["E2B_API_KEY"] == key


def test_env_takes_another_key(home: Home) -> None:
    home.up()
    secret = home.ok("keys", "create", "ci").strip()
    file = home.root / "ci.key"
    file.write_text(secret + "\n", encoding="utf-8")
    assert f"export E2B_API_KEY={secret}\n" in home.ok("env", "--key-file", str(file))
    file.write_text("not a key", encoding="utf-8")
    assert "does not hold an API key" in home.run("env", "--key-file", str(file)).stderr
    assert "cannot read the API key" in home.run("env", "--key-file", str(home.root / "none")).stderr


def test_the_commands_say_when_nothing_runs(home: Home) -> None:
    for command in (["env"], ["run", "--", "true"], ["exec", "i" + "0" * 19, "--", "true"]):
        done = home.run(*command)
        assert done.returncode == 1
        assert "nothing is running" in done.stderr
        assert f"`greenroom --state-dir {home.state.root} up --detach` starts it" in done.stderr
        assert not home.state.root.exists(), "asking makes nothing"


def test_run_passes_output_status_and_arguments_on(home: Home) -> None:
    home.up()
    done = home.run(
        "run", "--env", "NAME=wörld", "--", "sh", "-c", 'echo "hello $NAME"; echo oops >&2; exit 7'
    )
    assert (done.returncode, done.stdout) == (7, "hello wörld\n")
    assert "oops\n" in done.stderr
    words = ["printf", "%s|", "a b", "$HOME", "'", "-x", "--", "*"]
    assert home.ok("run", "--timeout", "77", "--", *words) == "a b|$HOME|'|-x|--|*|"
    assert home.ok("run", "printf", "%s", "-n") == "-n"
    made = [line for line in notes(home) if line.startswith("created")]
    assert [line.split()[2] for line in made] == ["300", "77", "300"]
    assert sum(line.startswith("killed") for line in notes(home)) == 3, "each sandbox is killed"


def test_run_tells_a_signal_as_a_shell_does(home: Home) -> None:
    home.up()
    assert home.run("run", "--", "sh", "-c", "kill -9 $$").returncode in (137, 128 + 9)


def test_run_kills_its_sandbox_on_every_signal_that_asks_for_its_end(home: Home) -> None:
    home.up()
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        home.journal.unlink(missing_ok=True)
        process = home.start("run", "--", "sleep", "300")
        eventually(lambda: any(line.startswith("running") for line in notes(home)), "the command's start")
        process.send_signal(number)
        _out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == status, err
        assert notes(home)[-1].startswith("killed")
        assert b"Traceback" not in err


def test_run_ends_quietly_when_nobody_reads_on(home: Home) -> None:
    home.up()
    line = " ".join(map(shlex.quote, home.command("run", "--", "yes")))
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -n 1"], env=home.environment, capture_output=True, text=True,
        timeout=DEADLINE, check=True,
    )  # fmt: skip
    assert done.stdout == "y\n"
    assert "Traceback" not in done.stderr
    assert notes(home)[-1].startswith("killed")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
@pytest.mark.parametrize("moment", ["running", "not seen to start"])
def test_exec_ends_its_command_before_it_leaves(home: Home, number: signal.Signals, moment: str) -> None:
    if moment == "not seen to start":
        home.environment["GREENROOM_STANDIN_SILENT_START"] = "sleep 4321"
    home.up()
    sandbox = kept_sandbox(home)
    process = home.start("exec", sandbox, "--", "sh", "-c", "echo on; sleep 4321")
    eventually(lambda: any(line.startswith("running") for line in notes(home)), "the command's start")
    if moment == "running":
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
    command = int(next(line for line in notes(home) if line.startswith("running")).split()[1])
    process.send_signal(number)
    _out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (128 + number, b"")
    assert f"signalled {command} SIGNAL_SIGKILL" in notes(home)
    eventually(lambda: ProcessId.of(command) is None, "the end of the command")
    assert not any(line.startswith("killed") for line in notes(home)), "the sandbox stays"


def test_a_kept_sandbox_keeps_no_command_that_nobody_waits_for(home: Home) -> None:
    home.up()
    process = home.start("run", "--keep", "--", "sleep", "4321")
    eventually(lambda: any(line.startswith("running") for line in notes(home)), "the command's start")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert notes(home)[-1].endswith("SIGNAL_SIGKILL")


def test_exec_whose_reader_has_left_ends_its_command(home: Home) -> None:
    home.up()
    line = " ".join(map(shlex.quote, home.command("exec", kept_sandbox(home), "--", "yes")))
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -n 1"], env=home.environment, capture_output=True, text=True,
        timeout=DEADLINE, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("y\n", "")
    assert notes(home)[-1].endswith("SIGNAL_SIGKILL")


def test_the_simulated_engine_runs_no_commands_and_makes_no_sandbox_for_one(home: Home) -> None:
    home.up("--engine", "simulated")
    for command in (["run", "--", "true"], ["exec", "i" + "0" * 19, "--", "true"], ["bench", "claim"]):
        done = home.run(*command)
        assert done.returncode == 1
        assert "the simulated engine, which has no VMs and runs no commands" in done.stderr
        assert f"`greenroom --state-dir {home.state.root} down`" in done.stderr
    assert notes(home) == []
    assert "no command: the simulated engine" in home.ok("demo", *home.up_options())


def test_output_that_cannot_be_written_is_an_error_of_its_own(home: Home) -> None:
    home.up()
    for command in (
        ["run", "--", "yes"],
        ["status"],
        ["status", "--json"],
        ["env"],
        ["keys", "list"],
        ["version"],
    ):
        done = subprocess.run(
            ["bash", "-c", " ".join(map(shlex.quote, home.command(*command))) + " >/dev/full"],
            env=home.environment, capture_output=True, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
        assert done.returncode == 1, command
        assert done.stderr == "error: cannot write the output: No space left on device\n", command
    assert notes(home)[-1].startswith("killed")
    line = " ".join(map(shlex.quote, home.command("run", "--", "sh", "-c", "yes >&2")))
    done = subprocess.run(
        ["bash", "-c", f"{line} 2>/dev/full"], env=home.environment, timeout=DEADLINE, check=False
    )
    assert done.returncode == 1
    assert notes(home)[-1].startswith("killed")


def test_output_comes_as_it_is_written(home: Home) -> None:
    home.up()
    process = home.start("run", "--", "sh", "-c", "echo first; sleep 300")
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)


def test_a_dry_pool_is_asked_again_under_the_same_key(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_REFUSALS"] = "2"
    home.up()
    home.ok("run", "--", "true")
    assert next(line for line in notes(home) if line.startswith("created")).endswith("keys=1/3")


def test_run_says_what_the_api_says(home: Home) -> None:
    home.up()
    done = home.run("run", "--template", "nonsense", "--", "true")
    assert (done.returncode, done.stderr) == (1, "error: no template nonsense\n")
    file = home.root / "revoked.key"
    file.write_text(f"e2b_{'0' * 40}\n", encoding="utf-8")
    done = home.run("run", "--key-file", str(file), "--", "true")
    assert (done.returncode, done.stderr) == (1, "error: unknown API key\n")


def test_exec_uses_a_kept_sandbox(home: Home) -> None:
    home.up()
    kept = home.run("run", "--keep", "--", "true")
    sandbox = kept.stderr.split()[2]
    assert f"`greenroom --state-dir {home.state.root} exec {sandbox} -- …`" in kept.stderr
    done = home.run("exec", "--env", "A=1", sandbox, "--", "sh", "-c", 'echo "$A"; exit 3')
    assert (done.returncode, done.stdout) == (3, "1\n")
    assert not any(line.startswith("killed") for line in notes(home))
    assert f"connected {sandbox} 300" in notes(home)
    done = home.run("exec", "i" + "z" * 19, "--", "true")
    assert done.returncode == 1
    assert "not found" in done.stderr


def test_losing_the_sandbox_is_an_error_not_a_status(home: Home) -> None:
    home.up()
    process = home.start("run", "--", "sleep", "300")
    eventually(lambda: any(line.startswith("running") for line in notes(home)), "the command's start")
    proxy = home.roles()["proxy-0"].process
    assert isinstance(proxy, ProcessId)
    proxy.signal(signal.SIGKILL)
    _out, err = process.communicate(timeout=DEADLINE * 2)
    assert process.returncode == 1
    assert b"error: " in err
    assert b"Traceback" not in err


def test_demo_starts_shows_and_stops(home: Home) -> None:
    done = home.run("demo", *home.up_options())
    assert done.returncode == 0, done.stderr
    for step in (
        "platform up",
        "created",
        "6 * 7 = 42",
        "exit status 0",
        "killed",
        "platform stopped",
        "in all",
    ):
        assert step in done.stdout
    assert home.state.running() is None
    assert home.marked() == []


def test_demo_leaves_a_running_platform_running(home: Home) -> None:
    home.up()
    pid = home.supervisor().pid
    done = home.run("demo", *home.up_options())
    assert done.returncode == 0, done.stderr
    assert "platform up" not in done.stdout
    assert "platform stopped" not in done.stdout
    assert home.supervisor().pid == pid


def test_keys_have_an_owner_and_rules(home: Home) -> None:
    made = json.loads(
        home.ok("keys", "create", "ci", "--owner", "team-a", "--allow", "get,list sandboxes in b", "--json")
    )
    assert (made["owner"], made["rules"]) == ("team-a", ["get,list sandboxes in b"])
    home.ok("keys", "create", "root", "--admin")
    home.ok("keys", "create", "plain", "--owner", "alice")
    home.ok("keys", "create", "mine", "--default")
    listed = {each["name"]: each for each in json.loads(home.ok("keys", "list", "--json"))}
    assert listed["root"]["rules"] == ["* * in *"]
    assert listed["plain"]["rules"] == []
    assert (listed["mine"]["rules"], listed["mine"]["default"]) == (["* * in *"], True)
    assert "all in alice" in home.ok("keys", "list")
    assert "a namespace" in home.run("keys", "create", "x", "--owner", "A_b").stderr
    assert "is no rule" in home.run("keys", "create", "x", "--allow", "everything").stderr
    assert "no verb 'lst'" in home.run("keys", "create", "x", "--allow", "lst sandboxes").stderr
    assert "sandboxwarmpools" in home.run("keys", "create", "x", "--allow", "get sandboxs").stderr
    assert "leave out" in home.run("keys", "create", "x", "--admin", "--allow", "* *").stderr


def test_env_writes_a_kubeconfig_that_only_its_owner_reads(home: Home) -> None:
    home.up()
    values = json.loads(home.ok("env", "--json"))
    place = Path(values["KUBECONFIG"])
    assert place == home.state.kubeconfig
    assert place.stat().st_mode & 0o777 == 0o600
    config = json.loads(place.read_text(encoding="utf-8"))
    assert config["users"][0]["user"]["token"] == values["E2B_API_KEY"]
    assert config["contexts"][0]["context"]["namespace"] == "default"
    other = home.root / "elsewhere" / "config"
    assert f"export KUBECONFIG={other}\n" in home.ok("env", "--kubeconfig", str(other))
    assert json.loads(other.read_text(encoding="utf-8")) == config


def test_keys_without_a_running_platform(home: Home) -> None:
    assert "there is no platform" in home.run("keys", "list").stderr
    secret = home.ok("keys", "create", "ci").strip()
    assert stat.S_IMODE(home.state.root.stat().st_mode) == 0o700
    (found,) = json.loads(home.ok("keys", "list", "--json"))
    assert found["name"] == "ci"
    assert secret.endswith(found["hint"])
    assert secret not in home.ok("keys", "list")
    assert home.ok("keys", "revoke", found["id"]) == f"revoked {found['id']}\n"
    assert home.ok("keys", "revoke", found["id"]) == f"{found['id']} is revoked already\n"
    other = home.run("keys", "create", "ci").stderr.split()[4].rstrip(";")
    by_name = home.run("keys", "revoke", "ci")
    assert by_name.returncode == 1
    assert f"The id of keys named ci: {found['id']} (revoked), {other}" in by_name.stderr
    assert "there is no key nonsense" in home.run("keys", "revoke", "nonsense").stderr
    assert json.loads(home.ok("keys", "list", "--json"))[0]["revoked_at"] is not None
    assert "1 to 100 printable" in home.run("keys", "create", "").stderr


def test_up_makes_one_default_key_and_keeps_it(home: Home) -> None:
    home.up()
    first = home.state.default_key.read_text(encoding="utf-8")
    home.ok("down")
    assert "made the API key" not in home.up()
    assert home.state.default_key.read_text(encoding="utf-8") == first
    (key,) = json.loads(home.ok("keys", "list", "--json"))
    assert key["name"] == "default"
    home.ok("keys", "revoke", key["id"], "--yes")
    home.ok("down")
    assert "made the API key" not in home.up(), "what was revoked is not made again"


def test_the_key_that_env_prints_is_not_revoked_by_accident(home: Home) -> None:
    home.up()
    (key,) = json.loads(home.ok("keys", "list", "--json"))
    refused = home.run("keys", "revoke", key["id"])
    assert (refused.returncode, refused.stdout) == (1, "")
    place = f"greenroom --state-dir {home.state.root}"
    assert f"is the key that `{place} env` prints" in refused.stderr
    assert f"`{place} keys create default --default` makes another" in refused.stderr
    assert f"`{place} keys revoke {key['id']} --yes`" in refused.stderr
    home.ok("env")
    done = home.run("keys", "revoke", key["id"], "--yes")
    assert done.stdout == f"revoked {key['id']}\n"
    assert f"`{place} keys create default --default` makes another" in done.stderr
    for command in (["env"], ["run", "--", "true"], ["exec", "i0", "--", "true"]):
        told = home.run(*command)
        assert (told.returncode, told.stdout) == (1, "")
        assert f"`{place} keys create default --default`" in told.stderr
    secret = home.ok("keys", "create", "default", "--default").strip()
    assert json.loads(home.ok("env", "--json"))["E2B_API_KEY"] == secret
    # Once there is another, the one before is like any other.
    first = json.loads(home.ok("keys", "list", "--json"))[-1]
    home.ok("keys", "create", "default", "--default")
    assert home.run("keys", "revoke", first["id"]).stderr == ""
    home.ok("env")


def test_env_does_not_print_a_key_that_is_not_taken(home: Home) -> None:
    home.up()
    home.state.default_key.write_text(f"e2b_{'0' * 40}\n", encoding="utf-8")
    done = home.run("env")
    assert (done.returncode, done.stdout) == (1, "")
    assert "was revoked, or is not one of this platform" in done.stderr
    assert "keys create default --default" in done.stderr
    file = home.root / "other.key"
    file.write_text(f"e2b_{'1' * 40}\n", encoding="utf-8")
    home.ok("env", "--key-file", str(file))
