"""HTTP/2 frame by frame: what no ordinary client sends, and resets as they come."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events

Fields = list[tuple[str, str]]


class Stream:
    """What has come on one stream."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.reset: int | None = None
        """The error code of its reset."""

    @property
    def status(self) -> int:
        return int(self.fields[":status"])


class Http2:
    """A client connection. Nothing it sends is checked for sense."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._streams: dict[int, Stream] = {}
        config = h2.config.H2Configuration(
            validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding="latin-1"
        )
        self._h2 = h2.connection.H2Connection(config)
        self._h2.initiate_connection()
        self.gone: int | None = None
        """The error code with which the server gave the connection up."""

    async def send(self, fields: Fields, *, end: bool = True) -> int:
        """Send a request's head; returns its stream."""
        number = self._h2.get_next_available_stream_id()
        self._streams[number] = Stream()
        self._h2.send_headers(number, fields, end_stream=end)
        await self._flush()
        return number

    async def write(self, number: int, data: bytes) -> None:
        self._h2.send_data(number, data)
        await self._flush()

    async def until_body(self, number: int, mark: bytes) -> Stream:
        """Read until `mark` has come on the stream, or it has ended."""
        stream = self._streams[number]
        while mark not in stream.body and not stream.ended and stream.reset is None:
            await self._read()
        return stream

    async def finish(self, number: int) -> Stream:
        """Read until the stream has ended or was reset, or the connection is over."""
        stream = self._streams[number]
        while not stream.ended and stream.reset is None and self.gone is None:
            await self._read()
        return stream

    async def ask(self, fields: Fields) -> Stream:
        return await self.finish(await self.send(fields))

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()

    async def _read(self) -> None:
        async with asyncio.timeout(20):
            data = await self._reader.read(65536)
        if not data:
            self.gone = -1 if self.gone is None else self.gone
            return
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.ConnectionTerminated):
                self.gone = int(event.error_code or 0)
                continue
            stream = self._streams.get(getattr(event, "stream_id", 0) or 0)
            if stream is None:
                continue
            if isinstance(event, h2.events.ResponseReceived):
                stream.fields = {str(name): str(value) for name, value in event.headers}
            elif isinstance(event, h2.events.DataReceived):
                stream.body += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                stream.ended = True
            elif isinstance(event, h2.events.StreamReset):
                stream.reset = int(event.error_code)
        await self._flush()


@asynccontextmanager
async def http2(address: tuple[str, int], context: ssl.SSLContext, name: str) -> AsyncIterator[Http2]:
    """A connection by TLS that asks for `name`."""
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
    try:
        yield Http2(reader, writer)
    finally:
        writer.transport.abort()
