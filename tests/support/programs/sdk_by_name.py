"""What a user's program does with E2B's SDK, run by `tests/platform/test_inbound.py` in a process of its own.

It gets E2B_API_KEY, E2B_DOMAIN and SSL_CERT_FILE and nothing else that says where the platform is. Each function is
one scenario; the process ends with 0 when it held.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import httpx
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

SERVER = "python3 -m http.server {port} --bind {address} --directory /home/user"
ECHO = """
import http.server, json, ssl, sys
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({k.lower(): v for k, v in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Greenroom-Partial", "from the guest")
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Echo)
if sys.argv[2:] == ["tls"]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("/home/user/cert.pem", "/home/user/key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def get(url: str, deadline: float = 60.0, **headers: str) -> httpx.Response:
    """The first answer that is not about a port that is not open yet: services take a moment to start."""
    end = time.monotonic() + deadline
    with httpx.Client(timeout=30) as client:
        while True:
            answer = client.get(url, headers=headers)
            if "port is not open" not in answer.text or time.monotonic() > end:
                return answer


def names_alone() -> None:
    """API, commands, files, signed URLs and get_host(), all found by the domain, all by HTTPS."""
    with Sandbox.create(timeout=120) as box:
        assert box.commands.run("echo hello").stdout == "hello\n"
        box.files.write("a ü.txt", "content")
        url = box.download_url("a ü.txt")
        assert url.startswith(f"https://49983-{box.sandbox_id}.")
        assert httpx.get(url).text == "content"
        up = httpx.post(box.upload_url("b.txt"), files={"file": ("b.txt", b"uploaded")})
        assert up.status_code == 200, up.text
        assert box.files.read("b.txt") == "uploaded"
        box.commands.run(SERVER.format(port=8000, address="0.0.0.0"), background=True)
        host = box.get_host(8000)
        assert get(f"https://{host}/a%20%C3%BC.txt").text == "content"
        with httpx.Client(http2=True) as client:
            answer = client.get(f"https://{host}/b.txt")
            assert (answer.http_version, answer.text) == ("HTTP/2", "uploaded")
        closed = httpx.get(f"https://{box.get_host(8001)}/")
        assert closed.status_code == 502
        assert closed.json() == {
            "sandboxId": box.sandbox_id,
            "message": "The sandbox is running but port is not open",
            "port": 8001,
            "code": 502,
        }
    gone = httpx.get(f"https://{host}/")
    assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")


def private_ports() -> None:
    """allow_public_traffic: the token opens the ports, and only the token; the agent has its own."""
    with Sandbox.create(timeout=120, network={"allow_public_traffic": False}) as box:
        token = box.traffic_access_token
        assert token
        box.commands.run(SERVER.format(port=8000, address="0.0.0.0"), background=True)
        url = f"https://{box.get_host(8000)}/"
        assert get(url, **{"e2b-traffic-access-token": token}).status_code == 200
        assert httpx.get(url).status_code == 403
        assert httpx.get(url, headers={"e2b-traffic-access-token": token + "0"}).status_code == 403
        assert httpx.get(url).json()["code"] == 403
        assert Sandbox.connect(box.sandbox_id).traffic_access_token == token
    with Sandbox.create(timeout=120, network={"allow_public_traffic": True}) as box:
        assert box.traffic_access_token is None
        box.commands.run(SERVER.format(port=8000, address="0.0.0.0"), background=True)
        assert get(f"https://{box.get_host(8000)}/").status_code == 200


def masked_and_tls() -> None:
    """mask_request_host and https_ports, seen from the service in the guest."""
    network = {"mask_request_host": "localhost:${PORT}", "https_ports": [8443]}
    with Sandbox.create(timeout=180, network=network) as box:
        box.files.write("echo.py", ECHO)
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=guest"
        make += " -keyout key.pem -out cert.pem"
        box.commands.run(make, timeout=120)
        for port, kind in ((8000, ""), (8443, "tls")):
            box.commands.run(f"python3 echo.py {port} {kind}", background=True)
            answer = get(f"https://{box.get_host(port)}/", **{"E2b-Traffic-Access-Token": "not needed"})
            assert answer.status_code == 200, answer.text
            seen = answer.json()
            assert seen["host"] == f"localhost:{port}"
            assert "e2b-traffic-access-token" not in seen
            assert "x-greenroom-partial" not in answer.headers


def loopback() -> None:
    """What listens on the guest's own loopback is reached as well, with TLS or without, and only that which does."""
    with Sandbox.create(timeout=120, network={"mask_request_host": "localhost:${PORT}"}) as box:
        box.files.write("a.txt", "x" * 3_000_000)
        for port, address in ((8000, "127.0.0.1"), (8001, "::1")):
            box.commands.run(SERVER.format(port=port, address=address), background=True)
            assert get(f"https://{box.get_host(port)}/a.txt").text == "x" * 3_000_000
        closed = httpx.get(f"https://{box.get_host(8002)}/")
        assert (closed.status_code, closed.json()["port"]) == (502, 8002)
        inside = httpx.get(
            f"https://{box.get_host(49983)}/upgrade/loopback/8000", headers={"x-greenroom-control": ""}
        )
        assert inside.status_code == 404


def killed() -> None:
    """What runs when its sandbox is killed learns that, over HTTP/2 too."""
    box = Sandbox.create(timeout=120)
    handle = box.commands.run("echo begun; sleep 60", background=True)
    running = iter(handle)
    assert next(running)[0] == "begun\n"
    assert Sandbox.kill(box.sandbox_id)
    with pytest.raises(SandboxException, match="killed or reached its end of life"):
        handle.wait()
    assert not box.is_running()


SCENARIOS: dict[str, Callable[[], None]] = {
    scenario.__name__: scenario for scenario in (names_alone, private_ports, masked_and_tls, loopback, killed)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
    print(json.dumps({"held": sys.argv[1]}))
