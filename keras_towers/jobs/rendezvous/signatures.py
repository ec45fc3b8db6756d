"""Authenticates requests to a job's store: the token, and the signatures.

Requests and answers of this package are signed with the job's secret. Horovod's
clients, which cannot sign, send a token in their paths.
"""

from __future__ import annotations

import dataclasses
import hmac

SIGNATURE = "X-Keras-Towers-Signature"
"""The header of the signature of a request, or of an answer."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The address of a store's server, and the secret of its job."""

    address: str
    port: int
    secret: str

    @property
    def prefix(self) -> str:
        """The start of every path: the token and Horovod's port."""
        return f"{path_token(self.secret)}:{self.port}"

    def sign_request(self, method: str, path: str, body: bytes) -> str:
        """Return the signature of a request."""
        return _digest(self.secret, f"{method} {path}\n".encode() + body)

    def sign_answer(self, method: str, path: str, body: bytes) -> str:
        """Return the signature of the answer to a request."""
        return self.sign_request(f"ANSWER {method}", path, body)


def path_token(secret: str) -> str:
    """Return the start of every path, which reveals nothing about the secret.

    Horovod's C++ code cannot sign its requests. But it concatenates "http://",
    the host's name, the port and the path as text. So a token at the end of the
    host's name becomes part of every path.
    """
    return _digest(secret, b"token")


def sign_file(secret: str, content: bytes) -> bytes:
    """Return the signature of a file of the job."""
    return bytes.fromhex(_digest(secret, b"file\n" + content))


def is_equal(one: str, other: str) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def _digest(secret: str, message: bytes) -> str:
    return hmac.digest(secret.encode(), message, "sha256").hex()
