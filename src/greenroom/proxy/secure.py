"""The certificate that the entry shows: kept valid, and handed to Envoy whenever it is another one.

Two things change it: this, as its end comes near, and `greenroom certs`, at any time. Both write to the state
directory (`certificate_files`); what lies there is looked at every few seconds and goes to Envoy as one file, so that
it never sees a certificate with another's key. Nothing is started anew and no connection is cut for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from greenroom.errors import BadRequest, GreenroomError, SetupError
from greenroom.proxy import resources
from greenroom.wire import certificate_files, certificates
from greenroom.wire.certificates import Names, Pair

_log = logging.getLogger(__name__)

LOOK_EVERY = 2.0
"""Seconds between two looks at the files, which take a fraction of a millisecond."""
RENEW_EVERY = 3600.0
"""Seconds between two questions whether it is time for a new one, which lasts for a month."""


class Certificate:
    """One domain's certificate (or that of some names) on its way to Envoy, where `secret` names it. `write` replaces
    a file of Envoy's directory (`EnvoyFiles`).

    Raises SetupError for a domain that can have none.
    """

    def __init__(
        self,
        state: Path,
        domain: str | Names,
        write: Callable[[str, bytes], None],
        secret: str = resources.CERTIFICATE,
    ) -> None:
        self._state = state
        # Checked here so that a domain that can have none is told before anything is started.
        try:
            self._names = domain if isinstance(domain, Names) else Names.below(certificates.host_of(domain))
        except BadRequest as error:
            raise SetupError(error.message) from error
        self._domain = self._names.label
        self._secret = secret
        self._write = write
        self._shown: Pair | None = None
        self.ends = 0.0
        """When what is shown ends, in Unix seconds; 0 before the first."""

    def __repr__(self) -> str:
        return f"<Certificate for {self._domain}: {self._shown!r}>"

    async def show(self) -> None:
        """Make what is missing or near its end, and hand it on. Raises SetupError when that cannot be done."""
        # Another process may hold the files' lock.
        held = await asyncio.to_thread(certificate_files.ensure, self._state, self._names, time.time())
        if held.new_authority:
            _log.warning("made a new certificate authority; clients must trust %s", held.authority_file)
        self._hand_on(held.pair)

    async def keep(self) -> None:
        """Follow the files and renew in time. Runs until it is cancelled; what fails is tried again."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + RENEW_EVERY
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                if loop.time() >= renew_at:
                    renew_at = loop.time() + RENEW_EVERY
                    await self.show()
                elif (pair := certificate_files.current(self._state, self._names)) is not None:
                    self._hand_on(pair)
            except (GreenroomError, OSError, ValueError) as error:
                _log.error("the certificate of %s cannot be kept up: %s", self._domain, error)

    def _hand_on(self, pair: Pair) -> None:
        if pair == self._shown:
            return
        ends = self.ends = certificates.ends_at(pair.certificate)
        secret = resources.certificate(pair.certificate, pair.key, self._secret)
        self._write(self._secret, resources.discovery(str(int(time.time())), [secret]))
        self._shown = pair
        _log.info(
            "the entry shows the certificate %s of %s until %s",
            certificates.fingerprint(pair.certificate)[:23],
            self._domain,
            time.strftime("%Y-%m-%d", time.gmtime(ends)),
        )
