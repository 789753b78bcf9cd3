"""A token server: clients get a signed JWT for their secret, and the broker the key that verifies it (OIDC)."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "of-"
"""A client's secret is this and its id."""


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _openssl(*arguments: str, data: bytes = b"") -> bytes:
    return subprocess.run(["openssl", *arguments], input=data, capture_output=True, check=True).stdout  # noqa: S607


def _token(key: Path, subject: str) -> str:
    """Return a token of a minute, for the audience `kafka`."""
    now = int(time.time())
    claims = {"sub": subject, "aud": "kafka", "iss": "kmq", "iat": now, "exp": now + 60}
    signed = ".".join(_text(json.dumps(part).encode()) for part in ({"alg": "RS256", "kid": "k"}, claims))
    return f"{signed}.{_text(_openssl('dgst', '-sha256', '-sign', str(key), data=signed.encode()))}"


@contextmanager
def token_server(folder: Path) -> Iterator[str]:
    """Run a server on loopback, with its key in a folder; yield its address."""
    key = folder / "token.key"
    _openssl("genrsa", "-out", str(key), "2048")
    modulus = _openssl("rsa", "-in", str(key), "-noout", "-modulus").decode().strip().partition("=")[2]
    verifies = {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": "k", "e": "AQAB", "n": _text(bytes.fromhex(modulus))}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"keys": [verifies]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            credentials = self.headers.get("Authorization", "").removeprefix("Basic ")
            client, _, secret = base64.b64decode(credentials).decode().partition(":")
            if secret != SECRET + client:
                self._answer(401, {"error": "invalid_client"})
            else:
                self._answer(200, {"access_token": _token(key, client), "token_type": "Bearer", "expires_in": 60})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
