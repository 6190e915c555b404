"""Frames of a link and the proof that both ends belong to one cluster.

Every frame is a fixed header (kind, number, acknowledgement) and a payload. The TCP connection is encrypted
with CURVE; both key pairs follow from the cluster token, so whoever lacks the token cannot complete a
handshake, and the greeting repeats the proof as an HMAC that is compared in constant time.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import zmq
from zmq.utils import z85

from antiphon.protocol.codec import decode, encode
from antiphon.protocol.errors import ConfigError, WireError
from antiphon.protocol.identity import PROTOCOL_VERSION, Role
from antiphon.protocol.messages import Hello

MIN_TOKEN_CHARS = 16
_HEADER = struct.Struct("<BQQ")


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """One life of one process at the other end of a link."""

    role: Role
    worker_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.role} {self.worker_id} (epoch {self.epoch})"


class FrameKind(IntEnum):
    """What a frame carries."""

    GREETING = 0
    MESSAGE = 1
    """A numbered message of the protocol."""
    HEARTBEAT = 2
    """A Heartbeat; not numbered."""
    REFUSAL = 3
    """UTF-8 reason why the greeting was not accepted."""
    FAREWELL = 4
    """The sender ends the session; UTF-8 reason."""


class Frame(msgspec.Struct, frozen=True):
    """A parsed frame."""

    kind: FrameKind
    number: int
    acknowledged: int
    payload: bytes


def pack(kind: FrameKind, payload: bytes, number: int = 0, acknowledged: int = 0) -> bytes:
    """Header and payload as one buffer."""
    return _HEADER.pack(kind, number, acknowledged) + payload


def unpack(data: bytes) -> Frame:
    """Parse one frame.

    Raises:
        WireError: shorter than a header, or of an unknown kind.
    """
    if len(data) < _HEADER.size:
        raise WireError(f"a frame of {len(data)} bytes is shorter than its header")
    kind, number, acknowledged = _HEADER.unpack_from(data)
    try:
        return Frame(FrameKind(kind), number, acknowledged, data[_HEADER.size :])
    except ValueError as error:
        raise WireError(f"unknown frame kind {kind}") from error


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First frame of a connection, both ways.

    ``session`` is drawn by the connecting side; ``resuming`` says that it expects the other side to know it.
    ``received`` is the number of the last message taken in that session.
    """

    hello: bytes
    session: int
    resuming: bool
    received: int
    proof: bytes


_greeting_decoder = msgspec.msgpack.Decoder(Greeting)


class ClusterKeys:
    """Everything that follows from the cluster token."""

    def __init__(self, cluster_token: str) -> None:
        if len(cluster_token) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"cluster token: {len(cluster_token)} characters, expected at least {MIN_TOKEN_CHARS}"
            )
        if not zmq.has("curve"):
            raise ConfigError("the installed libzmq has no CURVE encryption; links would be readable")
        self._token = cluster_token.encode()
        self._server_secret = z85.encode(self._derive(b"antiphon link server key"))
        self._client_secret = z85.encode(self._derive(b"antiphon link client key"))

    def _derive(self, label: bytes) -> bytes:
        return hmac.digest(self._token, label, "sha256")

    def secure(self, socket: zmq.Socket[bytes], listening: bool) -> None:
        """Set the CURVE keys of a socket before it binds or connects."""
        secret = self._server_secret if listening else self._client_secret
        socket.curve_secretkey = secret
        socket.curve_publickey = zmq.curve_public(secret)
        if listening:
            socket.curve_server = True
        else:
            socket.curve_serverkey = zmq.curve_public(self._server_secret)

    def _proof(self, hello: bytes, session: int, listening: bool) -> bytes:
        label = b"listening" if listening else b"connecting"
        return self._derive(b"antiphon link greeting " + label + session.to_bytes(8, "little") + hello)

    def greet(self, me: Peer, session: int, resuming: bool, received: int, listening: bool) -> bytes:
        """The greeting frame of this end."""
        hello = encode(Hello(PROTOCOL_VERSION, me.role, me.worker_id, me.epoch))
        proof = self._proof(hello, session, listening)
        greeting = Greeting(hello, session, resuming, received, proof)
        return pack(FrameKind.GREETING, msgspec.msgpack.encode(greeting))

    def check(self, payload: bytes, from_listening: bool) -> tuple[Greeting, Peer]:
        """Parse and verify a greeting.

        Raises:
            WireError: malformed, without the cluster token, or of another protocol version.
        """
        try:
            greeting = _greeting_decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise WireError(f"malformed greeting: {error}") from error
        expected = self._proof(greeting.hello, greeting.session, from_listening)
        if not hmac.compare_digest(expected, greeting.proof):
            raise WireError("the greeting was not made with this cluster's token")
        hello = decode(greeting.hello)
        if not isinstance(hello, Hello):
            raise WireError(f"the greeting holds a {type(hello).__name__} instead of a Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise WireError(
                f"protocol version {PROTOCOL_VERSION} here, {hello.protocol_version} at {hello.worker_id}"
            )
        return greeting, Peer(hello.role, hello.worker_id, hello.epoch)
