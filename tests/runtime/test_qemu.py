"""The real engine: what a VM is fenced in by, what it cannot reach, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from greenroom.config import default_cache_dir
from greenroom.errors import RuntimeFailure, SetupError
from greenroom.runtime import golden as goldens
from greenroom.runtime import guestclient, namespaces
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.engine import Golden, Identity, Vm
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.vm import QemuVm
from greenroom.wire.tasks import spawn
from tests.runtime.conftest import spec_in
from tests.support.shell import sh

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]


def identity(**changes: object) -> Identity:
    fields: dict[str, object] = {
        "entropy": secrets.token_bytes(64),
        "machine_id": secrets.token_hex(16),
        **changes,
    }
    return Identity(**fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def restored(engine: QemuRuntime, golden: Golden) -> AsyncIterator[QemuVm]:
    vm = await engine.restore(golden)
    assert isinstance(vm, QemuVm)
    try:
        yield vm
    finally:
        await engine.stop(vm)


@contextlib.asynccontextmanager
async def running(engine: QemuRuntime, golden: Golden, **changes: object) -> AsyncIterator[QemuVm]:
    async with restored(engine, golden) as vm:
        await engine.start(vm)
        await engine.introduce(vm, identity(**changes), 60)
        yield vm


def status_of(pid: int | None) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_a_restored_vm_is_paused_and_has_not_run(engine: QemuRuntime, golden: Golden) -> None:
    async with restored(engine, golden) as vm:
        answer = await vm.execute("query-status")
        assert (answer["running"], answer["status"]) in [
            (False, "paused"),
            (False, "inmigrate"),
            (False, "prelaunch"),
        ]
        with pytest.raises((OSError, TimeoutError)):
            await vm.connect(guestclient.AGENT_PORT, deadline=0.3)


async def test_qemu_runs_without_any_privilege(engine: QemuRuntime, golden: Golden) -> None:
    async with restored(engine, golden) as first, restored(engine, golden) as second:
        status = status_of(first.pid)
        assert set(status["Uid"].split()) == {str(first.uid)}
        assert set(status["Gid"].split()) == {str(first.uid)}
        assert status["Groups"] == ""
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert first.uid != second.uid
        assert first.uid >= 200_000


async def test_qemu_is_in_its_own_namespace_with_deny_rules(engine: QemuRuntime, golden: Golden) -> None:
    async with restored(engine, golden) as first, restored(engine, golden) as second:
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in (first.pid, second.pid, "self")}
        assert len(spaces) == 3
        rules = subprocess.run(
            ["nsenter", f"--net=/run/netns/{first.name}", "nft", "list", "ruleset"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert rules.count("policy drop") == 2
        assert "table inet greenroom" in rules


async def test_cgroups_bound_memory_cpu_and_threads(engine: QemuRuntime, golden: Golden) -> None:
    async with restored(engine, golden) as vm:
        cgroups = Cgroups.detect()
        path = f"greenroom/{vm.name.split('-')[1]}/{vm.name.split('-')[2]}"
        assert cgroups.pids(path) == {vm.pid}
        values = {
            file.name: file.read_text(encoding="ascii").strip()
            for directory in cgroups.directories(path)
            for file in directory.iterdir()
            if file.name in ("memory.limit_in_bytes", "memory.max", "cpu.cfs_quota_us", "cpu.max", "pids.max")
        }
        memory = values.get("memory.limit_in_bytes") or values["memory.max"]
        assert int(memory) == (2 * 512 + 192 + 256) << 20
        quota = values.get("cpu.cfs_quota_us") or values["cpu.max"].split()[0]
        assert int(quota) == 125_000
        assert values["pids.max"] == "128"


async def test_clones_differ_in_all_that_makes_a_machine_somebody(
    engine: QemuRuntime, golden: Golden
) -> None:
    script = (
        "cat /etc/machine-id; hostname; cat /proc/sys/kernel/random/uuid; "
        "python3 -c 'import os, uuid, random; print(uuid.uuid4(), os.urandom(8).hex(), random.random())'; "
        "cat /proc/sys/kernel/random/boot_id"
    )
    answers = []
    for number in range(2):
        async with running(engine, golden, hostname=f"clone-{number}") as vm:
            result = await sh(vm, script)
            assert result.code == 0
            answers.append(result.out.split())
    first, second = answers
    assert first[1] == "clone-0"
    assert len(first) == len(second) == 7
    assert not set(first) & set(second)
    assert len(first[0]) == 32


async def test_the_clock_is_right_after_the_introduction(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        best = None
        for _ in range(10):
            before = time.time_ns()
            secret = {"X-Greenroom-Control": vm.slot.control}
            _, raw = await guestclient.request(vm, "GET", "/clock", deadline=10, headers=secret)
            after = time.time_ns()
            offset_ms = (int(raw.split(b":")[1].strip(b" }")) - (before + after) // 2) / 1e6
            if best is None or after - before < best[0]:
                best = (after - before, offset_ms)
        assert best is not None
        assert abs(best[1]) < 50 + best[0] / 2e6


async def test_the_guest_reaches_neither_the_host_nor_its_namespace_nor_another_guest(
    engine: QemuRuntime, golden: Golden
) -> None:
    own = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    hosts = [address for address in own if ":" not in address]
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        async with running(engine, golden) as vm, running(engine, golden):
            probe = (
                "import socket, sys\n"
                "for host, port in [a.rsplit(',', 1) for a in sys.argv[1:]]:\n"
                "    s = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)\n"
                "    s.settimeout(1.5)\n"
                "    try:\n"
                "        s.connect((host, int(port)) + ((0, 2) if ':' in host else ()))\n"
                "        print('OPEN', host, port)\n"
                "    except TimeoutError: print('silent', host)\n"
                "    except OSError as e: print('closed', host, e.errno)\n"
            )
            targets = [f"{host},{port}" for host in [*hosts, "10.0.2.2", "169.254.169.254", "10.0.2.16"]]
            link_local = subprocess.run(
                ["nsenter", f"--net=/run/netns/{vm.name}", "ip", "-6", "-br", "addr", "show", "tap0"],
                capture_output=True, text=True, check=True,
            ).stdout.split()  # fmt: skip
            targets += [f"{word.split('/')[0]},{port}" for word in link_local if word.startswith("fe80")]
            targets.append(f"fe80::5054:ff:fe47:5202,{port}")
            listening = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{vm.name}", sys.executable, "-c",
                 f"import socket; s = socket.create_server(('::', {port}), family=socket.AF_INET6, "
                 "dualstack_ipv6=True); print('up', flush=True); s.accept()"],
                stdout=subprocess.PIPE,
            )  # fmt: skip
            try:
                assert listening.stdout is not None
                assert listening.stdout.readline() == b"up\n"
                result = await sh(vm, f'python3 -c "{probe}" {" ".join(targets)}')
            finally:
                listening.kill()
                listening.communicate()
            assert result.code == 0, result.out
            assert "OPEN" not in result.out
            assert result.out.count("\n") == len(targets)


async def test_no_datagram_of_a_guest_arrives_anywhere(engine: QemuRuntime, golden: Golden) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
        outside.bind(("0.0.0.0", 0))
        outside.setblocking(False)
        port = outside.getsockname()[1]
        async with running(engine, golden) as vm:
            assert vm._handle is not None
            inside = namespaces.open_socket(vm._handle, socket.SOCK_DGRAM)
            with inside:
                inside.bind(("0.0.0.0", port))
                own = subprocess.run(
                    ["hostname", "-I"], capture_output=True, text=True, check=True
                ).stdout.split()
                targets = [address for address in own if ":" not in address] + ["10.0.2.2", "10.0.2.255"]
                send = "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); " + (
                    "s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); "
                    f"[s.sendto(b'x', (h, {port})) for h in sys.argv[1:]]"
                )
                assert (await sh(vm, f'python3 -c "{send}" {" ".join(targets)}')).code == 0
                # The round trip above is behind the datagrams: what was let through has arrived by now.
                for listener in (outside, inside):
                    with pytest.raises(BlockingIOError):
                        listener.recv(16)


async def test_no_sandbox_uid_can_alter_golden_ram_or_a_base_disk(
    engine: QemuRuntime, golden: Golden
) -> None:
    loaded = engine._goldens[golden.digest]
    before = os.pread(loaded.ram, 4096, 0)
    attack = r"""
import ctypes, fcntl, mmap, os, sys
uid, ram, *disks = map(int, sys.argv[1:])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
# A process that was exec'ed under its uid, as QEMU was, may look into its own /proc: be as free as that.
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
assert os.getresuid() == (uid, uid, uid) and os.access("/proc/self/fd", os.R_OK)
def tried(name, work):
    try:
        work()
    except (OSError, PermissionError, ValueError) as error:
        print("refused", name)
    else:
        print("ALLOWED", name)
again = None
try:
    again = os.open(f"/proc/self/fd/{ram}", os.O_RDWR)
except OSError:
    pass
for fd in filter(None, (ram, again)):
    tried("write", lambda: os.pwrite(fd, b"x", 0))
    tried("truncate", lambda: os.ftruncate(fd, 0))
    tried("grow", lambda: os.ftruncate(fd, 1 << 40))
    tried("shared map", lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    tried("unseal", lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10))
    tried("punch", lambda: os.posix_fallocate(fd, 1 << 41, 1))
for fd in disks:
    tried("disk write", lambda: os.pwrite(fd, b"x", 0))
    tried("disk truncate", lambda: os.ftruncate(fd, 0))
    tried("disk reopen", lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    tried("disk chmod", lambda: os.fchmod(fd, 0o777))
    tried("disk path", lambda: os.open(os.readlink(f"/proc/self/fd/{fd}"), os.O_RDWR))
private = mmap.mmap(ram, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
private[0:1] = b"y"
print("private write stays private")
"""
    fds = (loaded.ram, *loaded.backing)
    async with restored(engine, golden) as vm:
        done = subprocess.run(
            [sys.executable, "-c", attack, str(vm.uid), *map(str, fds)],
            pass_fds=fds, capture_output=True, text=True, check=False, cwd="/",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ALLOWED" not in done.stdout, done.stdout
    assert done.stdout.count("refused") >= 6 + 2 * 5
    assert "private write stays private" in done.stdout
    assert os.pread(loaded.ram, 4096, 0) == before


async def test_what_one_clone_writes_no_other_sees(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        assert (await sh(vm, "echo mine > /root/mark && sync && cat /root/mark")).out == "mine\n"
    async with running(engine, golden) as vm:
        assert (await sh(vm, "cat /root/mark")).code != 0


async def test_pause_stops_the_guest_and_resume_goes_on(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        await sh(vm, "echo before > /tmp/mark")
        await engine.pause(vm)
        with pytest.raises((OSError, TimeoutError)):
            await guestclient.request(vm, "GET", "/health", deadline=0.5)
        await engine.resume(vm)
        assert (await sh(vm, "cat /tmp/mark")).out == "before\n"


async def test_a_closed_port_is_refused(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        with pytest.raises(ConnectionRefusedError):
            await vm.connect(8123)


async def test_only_the_node_introduces_a_guest_again(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden, token="t") as vm:
        status, _ = await guestclient.request(vm, "POST", "/init", {"hostname": "stolen"}, deadline=20)
        assert status == 404
        await engine.introduce(vm, identity(hostname="renamed"), 20)
        assert (await sh(vm, "hostname", token="t")).out == "renamed\n"


async def test_the_base_has_what_people_expect(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        script = (
            "set -e; whoami; pwd; sudo -n whoami; for t in bash python3 python pip curl git ps pgrep ss tput; do "
            "command -v $t >/dev/null || { echo missing $t; exit 1; }; done; "
            "python3 -c 'import ssl, sqlite3, json; print(1)'; ip -4 -br addr show lo | grep -q 127.0.0.1 && echo lo"
        )
        result = await sh(vm, script, user="user")
        assert result == (0, "user\n/home/user\nroot\n1\nlo\n")


async def test_orphans_are_reaped(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        script = (
            "for i in 1 2 3; do (setsid sh -c 'exit 0' &) ; done; "
            'until [ -z "$(ps -eo stat= | grep ^Z)" ]; do :; done; echo ok'
        )
        assert (await sh(vm, script)).out == "ok\n"


async def test_a_vm_whose_qemu_is_killed_says_so(engine: QemuRuntime, golden: Golden) -> None:
    async with restored(engine, golden) as vm:
        assert vm.pid is not None
        os.kill(vm.pid, 9)
        await asyncio.wait_for(vm.ended.wait(), 20)
        assert vm.state == "ended"


async def test_stopping_twice_and_at_once_is_fine(engine: QemuRuntime, golden: Golden) -> None:
    vm = await engine.restore(golden)
    await asyncio.gather(engine.stop(vm), engine.stop(vm))
    assert not namespaces.listing(vm.name)


async def test_a_restore_that_fails_gives_everything_back(
    engine: QemuRuntime, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.left()
    broken = tmp_path / "state"
    broken.write_bytes(b"this is no device state" * 100)
    monkeypatch.setattr(
        goldens.Loaded, "open_state", lambda _self: os.open(broken, os.O_RDONLY | os.O_CLOEXEC)
    )
    with pytest.raises(RuntimeFailure):
        await engine.restore(golden)
    assert engine.left() == before


async def test_a_golden_that_is_being_made_can_be_given_up(engine: QemuRuntime, golden: Golden) -> None:
    before = engine.left()
    cached = {entry.name for entry in default_cache_dir().iterdir()}
    booting = asyncio.Event()
    loop = asyncio.get_running_loop()

    def progress(step: str, _done: float | None) -> None:
        if "booting" in step:
            loop.call_soon_threadsafe(booting.set)

    size = msgspec.structs.replace(golden.size, name=f"never-{secrets.token_hex(4)}")
    making = spawn(engine.snapshot_golden("base", size, progress), "a golden")
    await asyncio.wait_for(booting.wait(), 120)
    engine.interrupt()
    with pytest.raises(SetupError, match="given up"):
        await making
    assert engine.left() == before
    left = {entry.name for entry in default_cache_dir().iterdir()} - cached
    assert all(name.endswith(".lock") for name in left), left
    for name in left:
        (default_cache_dir() / name).unlink()


async def test_a_vm_that_runs_for_long_stays_within_its_memory(engine: QemuRuntime, golden: Golden) -> None:
    # What emulation translates is kept; without a bound of its own it grows past the VM's limit with every command.
    async with running(engine, golden) as vm:
        many = "for i in $(seq 120); do cat /etc/machine-id; hostname; python3 -c 'print(1)'; done | tail -1"
        assert (await sh(vm, many, deadline=240)).out == "1\n"
        fields = Path(f"/proc/{vm.pid}/status").read_text(encoding="ascii").splitlines()
        anonymous = next(int(line.split()[1]) for line in fields if line.startswith("RssAnon"))
        assert anonymous < (512 + 256 + 192) << 10
        assert not vm.ended.is_set()


async def test_the_very_first_vm_of_a_golden_may_use_all_its_memory(golden: Golden, tmp_path: Path) -> None:
    # Pages that are holes in the golden are charged to whoever touches them first, beside its own copies.
    fresh = QemuRuntime(spec_in(tmp_path))
    try:
        loaded = await fresh.snapshot_golden("base", golden.size, lambda _step, _done: None)
        async with running(fresh, loaded) as vm:
            result = await sh(vm, "python3 -c \"x = b'a' * (380 << 20); print(len(x))\"", deadline=120)
            assert result == (0, f"{380 << 20}\n")
            assert not vm.ended.is_set()
    finally:
        await fresh.close()


async def test_a_guest_that_reboots_ends(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        with pytest.raises((OSError, TimeoutError, AssertionError)):
            await sh(vm, "busybox reboot -f; sleep 60", deadline=30)
        await asyncio.wait_for(vm.ended.wait(), 30)


@contextlib.asynccontextmanager
async def left_alone(
    golden: Golden, state: Path
) -> AsyncIterator[tuple[QemuRuntime, Callable[[], QemuRuntime]]]:
    """A node that is about to let go of its VMs, and what makes its heirs on the same state directory."""
    dead = QemuRuntime(spec_in(state))
    heirs: list[QemuRuntime] = []

    def heir() -> QemuRuntime:
        heirs.append(QemuRuntime(spec_in(state)))
        return heirs[-1]

    await dead.snapshot_golden("base", golden.size, lambda _step, _done: None)
    try:
        yield dead, heir
    finally:
        for runtime in (dead, *heirs):
            await runtime.close()
        last = heir()
        await last.sweep()
        await last.close()
        assert not any(last.left().values())


async def test_an_heir_adopts_paused_and_claimed_vms_and_can_do_with_them_what_their_maker_could(
    golden: Golden, tmp_path: Path
) -> None:
    async with left_alone(golden, tmp_path) as (dead, make_heir):
        warm, claimed = await dead.restore(golden), await dead.restore(golden)
        await dead.hand_out(claimed)
        await dead.start(claimed)
        await dead.introduce(claimed, identity(token="t"), 60)
        await sh(claimed, "echo kept > /tmp/mark", token="t")
        pids = {vm.describe().pid for vm in (warm, claimed)}
        await dead.detach()
        heir = make_heir()
        found = {adopted.vm.name: adopted for adopted in await heir.adopt()}
        assert {adopted.vm.describe().pid for adopted in found.values()} == pids
        again = found[claimed.name]
        assert (again.claimed, again.introduced, again.vm.describe().state) == (True, True, "running")
        spare = found[warm.name]
        assert (spare.claimed, spare.introduced, spare.vm.describe().state) == (False, False, "paused")
        assert not any((await heir.sweep()).values())
        assert (await sh(again.vm, "cat /tmp/mark", token="t")).out == "kept\n"
        await heir.pause(again.vm)
        await heir.resume(again.vm)
        await heir.introduce(again.vm, identity(), 30)
        await heir.start(spare.vm)
        await heir.introduce(spare.vm, identity(hostname="late"), 60)
        assert (await sh(spare.vm, "hostname")).out == "late\n"
        await heir.stop(spare.vm)
        assert spare.vm.ended.is_set()


async def test_an_heir_shares_the_goldens_ram_with_what_it_adopted(golden: Golden, tmp_path: Path) -> None:
    async with left_alone(golden, tmp_path) as (dead, make_heir):
        vm = await dead.restore(golden)
        inode = os.fstat(dead._goldens[golden.digest].ram).st_ino
        await dead.detach()
        heir = make_heir()
        await heir.adopt()
        await heir.snapshot_golden("base", golden.size, lambda _step, _done: None)
        assert os.fstat(heir._goldens[golden.digest].ram).st_ino == inode
        another = await heir.restore(golden)
        await heir.start(another)
        await heir.introduce(another, identity(), 60)
        assert vm.describe().pid != another.describe().pid


async def test_a_vm_that_was_not_finished_is_swept_not_adopted(golden: Golden, tmp_path: Path) -> None:
    async with left_alone(golden, tmp_path) as (dead, make_heir):
        vm = await dead.restore(golden)
        assert isinstance(vm, QemuVm)
        (vm.directory / "vm.json").unlink()
        await dead.detach()
        heir = make_heir()
        assert await heir.adopt() == []
        assert (await heir.sweep())["processes"] == 1


async def test_a_sweep_removes_what_a_dead_node_left_and_nothing_else(
    engine: QemuRuntime, golden: Golden, tmp_path: Path
) -> None:
    foreign_ns = f"foreign-{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", foreign_ns], check=True)
    foreign = subprocess.Popen(["sleep", "600"])
    dead = QemuRuntime(spec_in(tmp_path))
    try:
        await dead.snapshot_golden("base", golden.size, lambda _step, _done: None)
        left_behind: list[Vm] = [await dead.restore(golden), await dead.restore(golden)]
        async with restored(engine, golden) as neighbour:
            heir = QemuRuntime(spec_in(tmp_path))
            assert heir.left()["processes"] == 2
            removed = await heir.sweep()
            assert removed == {"processes": 2, "namespaces": 2, "cgroups": 2, "directories": 2}
            assert heir.left() == {"processes": 0, "namespaces": 0, "cgroups": 0, "directories": 0}
            assert (await neighbour.execute("query-status"))["running"] is False
            await heir.close()
        assert foreign.poll() is None
        assert foreign_ns in namespaces.listing("foreign-")
        for vm in left_behind:
            await asyncio.wait_for(vm.ended.wait(), 20)
    finally:
        await dead.close()
        foreign.kill()
        foreign.wait()
        subprocess.run(["ip", "netns", "delete", foreign_ns], check=True)
