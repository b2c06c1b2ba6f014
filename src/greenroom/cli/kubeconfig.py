"""The kubeconfig that `greenroom env` writes: where kubectl and client libraries find the platform, and its key.

The server's certificate is by an authority of the platform's own, which is in the file; nothing has to be installed.
"""

from __future__ import annotations

import base64
import json
import urllib.parse
from pathlib import Path
from typing import Any

from greenroom.cli.target import Target
from greenroom.errors import SetupError
from greenroom.wire import certificate_files
from greenroom.wire.certificates import CONTROL
from greenroom.wire.credentials import write_private

NAME = "greenroom"


def write(path: Path, state: Path, target: Target, namespace: str) -> None:
    """Write the file, for its owner's eyes only. Raises SetupError when it cannot be made."""
    if target.kube_port is None:
        raise SetupError(
            "this platform has no listener for Kubernetes' clients\n"
            "Stop it with `greenroom down` and start it without --kube-port none"
        )
    authority = certificate_files.place_of(state, CONTROL) / "ca.pem"
    try:
        made = config(_server(target), authority.read_bytes(), target.key, namespace)
        path.parent.mkdir(parents=True, exist_ok=True)
        # JSON is YAML, and nobody has to be trusted to quote.
        write_private(path, json.dumps(made, indent=2) + "\n")
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error


def _server(target: Target) -> str:
    host = urllib.parse.urlsplit(target.url).hostname or "127.0.0.1"
    return f"https://[{host}]:{target.kube_port}" if ":" in host else f"https://{host}:{target.kube_port}"


def config(server: str, authority: bytes, token: str, namespace: str) -> dict[str, Any]:
    """The document: one cluster, one user, one context."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": NAME,
                "cluster": {
                    "server": server,
                    "certificate-authority-data": base64.b64encode(authority).decode(),
                },
            }
        ],
        "users": [{"name": NAME, "user": {"token": token}}],
        "contexts": [
            {"name": NAME, "context": {"cluster": NAME, "user": NAME, "namespace": namespace}},
        ],
        "current-context": NAME,
    }
