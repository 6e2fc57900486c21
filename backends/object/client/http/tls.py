"""TLS: which authorities are trusted, and what a failed handshake means."""

from __future__ import annotations

import contextlib
import socket
import ssl

from kvtier.backends.object.client.http.endpoint import Address
from kvtier.backends.object.stores.errors import TLSRefused

_OUT_OF_TIME, _OTHER_HOST = (9, 10), (62, 64)
"""OpenSSL's codes for a certificate that is expired or not yet valid, or of another host."""


class TrustStore:
    """The authorities that are trusted: those in a file, or the system's."""

    def __init__(self, ca_bundle: str | None) -> None:
        self._ca_bundle = ca_bundle
        try:
            self._context = ssl.create_default_context(cafile=ca_bundle)
        except OSError as error:
            raise TLSRefused(f"the ca_bundle {ca_bundle} cannot be read: {error}") from error

    def handshake(self, sock: socket.socket, address: Address) -> ssl.SSLSocket:
        """Speak TLS on a connected socket; raises TLSRefused, or OSError if the server went away.

        After a certificate that is not trusted the authorities are read again, for the next
        connection: they may be replaced while this process runs.
        """
        try:
            return self._context.wrap_socket(sock, server_hostname=address.host)
        except ssl.SSLCertVerificationError as error:
            self._reload()
            raise _certificate_error(address, error) from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise  # the server went away, which says nothing of the configuration
        except ssl.SSLError as error:
            raise TLSRefused(
                f"{address} refuses TLS ({error.reason}): is the endpoint http:// rather than "
                "https://?",
                setting="endpoint",
            ) from error

    def _reload(self) -> None:
        with contextlib.suppress(OSError):  # somebody may just be writing the file
            if self._ca_bundle is None:
                self._context.load_default_certs()
            else:
                self._context.load_verify_locations(self._ca_bundle)


def _certificate_error(address: Address, error: ssl.SSLCertVerificationError) -> TLSRefused:
    said = f"the certificate of {address} is not trusted ({error.verify_message})"
    if error.verify_code in _OTHER_HOST:
        remedy = "write the endpoint as its certificate does, or addressing: path"
        return TLSRefused(f"{said}: {remedy}", setting="endpoint")
    if error.verify_code in _OUT_OF_TIME:
        remedy = "have it renewed, if the clock of this machine is right"
        return TLSRefused(f"{said}: {remedy}", setting="clock")
    return TLSRefused(f"{said}: name its authority as ca_bundle")
