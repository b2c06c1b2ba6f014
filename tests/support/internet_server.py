"""The servers of the stand-in internet: DNS, HTTP and TLS, in a process that lives in its namespace.

`python -m tests.support.internet_server CONFIG.json`; it prints `ready` and serves until its standard input ends.
What it answers tells which of its addresses was reached and which name was asked for. The zone is read anew for each
question, so that a test can move a name.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any


class Dns(asyncio.DatagramProtocol):
    """Answers A questions from `zone.json`, and notes each question in `questions.txt`."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = answer(self.home, data, 512)
        if reply is not None:
            self.transport.sendto(reply, addr)


def answer(home: Path, data: bytes, limit: int) -> bytes | None:
    """The reply to one question; None for one that is to stay without."""
    labels, place = [], 12
    while data[place]:
        labels.append(data[place + 1 : place + 1 + data[place]].decode())
        place += 1 + data[place]
    question = data[12 : place + 5]
    name = ".".join(labels)
    with (home / "questions.txt").open("a", encoding="utf-8") as notes:
        notes.write(f"{name} {int.from_bytes(data[place + 1 : place + 3], 'big')}\n")
    zone = json.loads((home / "zone.json").read_text(encoding="utf-8"))
    if zone.get(name) == "silent":
        return None
    addresses = [IPv4Address(text) for text in zone.get(name, [])]
    code = 0 if name in zone else 3
    alias = b"\x05alias\xc0\x0c"
    # Every answer goes by an alias, as half of the world's do.
    records = (
        [b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x00\x3c" + len(alias).to_bytes(2, "big") + alias]
        if addresses
        else []
    )
    records += [b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04" + address.packed for address in addresses]
    body = b"".join(records)
    head = (
        data[:2]
        + (0x8180 | code).to_bytes(2, "big")
        + b"\x00\x01"
        + len(records).to_bytes(2, "big")
        + bytes(4)
    )
    if len(head + question + body) > limit:
        return data[:2] + (0x8380).to_bytes(2, "big") + b"\x00\x01" + bytes(6) + question
    return head + question + body


async def dns_over_tcp(home: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One question by TCP."""
    size = int.from_bytes(await reader.readexactly(2), "big")
    reply = answer(home, await reader.readexactly(size), 65_535)
    if reply is not None:
        writer.write(len(reply).to_bytes(2, "big") + reply)
        await writer.drain()
    writer.close()


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """`/` tells who was reached, `/drip` sends a line every 50 ms for ever, `/echo` gives a body back."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        fields = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
        }
        if path.startswith("/drip"):
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            while True:
                writer.write(b"drip\n")
                await writer.drain()
                await asyncio.sleep(0.05)
        body = json.dumps(
            {
                "at": writer.get_extra_info("sockname")[0],
                "host": fields.get("host"),
                "tls": bool(writer.get_extra_info("ssl_object")),
            }
        ).encode()
        if path.startswith("/echo"):
            body = await reader.readexactly(int(fields["content-length"]))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()


async def banner(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that speaks first."""
    writer.write(b"hello from port 2525\r\n")
    await writer.drain()
    writer.close()


async def main(config: dict[str, Any]) -> None:
    """Serve until standard input ends."""
    home = Path(config["home"])
    loop = asyncio.get_running_loop()
    dns = config["dns"]
    await loop.create_datagram_endpoint(lambda: Dns(home), local_addr=(dns, 53))
    servers = [await asyncio.start_server(lambda r, w: dns_over_tcp(home, r, w), dns, 53)]
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(home / "server.pem")
    for address in config["hosts"]:
        servers.append(await asyncio.start_server(http, address, 80))
        servers.append(await asyncio.start_server(http, address, 443, ssl=tls))
        servers.append(await asyncio.start_server(banner, address, 2525))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
