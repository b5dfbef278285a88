"""Makes the listener that the settings ask for, and refuses what would be unsafe or cannot work."""

from __future__ import annotations

from starlette.types import ASGIApp

from llm4agents.api.context import Context
from llm4agents.api.listen import tls
from llm4agents.api.listen.counting import Bounds
from llm4agents.api.listen.edge import Edge
from llm4agents.api.listen.http1 import Shared
from llm4agents.api.listen.listener import ALPN, Address, Listener, bind
from llm4agents.api.listen.origin import Hosts, Proxies
from llm4agents.config import Settings
from llm4agents.errors import InvalidRequestError


class Opened:
    """A bound socket and its certificates: what can fail has, before anything of the server runs."""

    def __init__(self, settings: Settings, bounds: Bounds | None = None) -> None:
        """`settings.listen` is set. Raises InvalidRequestError, HostSetupError."""
        assert settings.listen is not None
        self._settings, self._bounds = settings, bounds or Bounds()
        wanted = Address.of(settings.listen)
        secure = tls.wanted(settings)
        if not secure and not wanted.own and not settings.insecure_http:
            raise InvalidRequestError(
                f"listening on {wanted} without TLS would send keys in the clear",
                hint="--tls-cert and --tls-key, or --tls-local; behind a proxy that has TLS: --insecure-http",
            )
        self._proxies = Proxies.of(settings.trusted_proxies)
        self.certificates = tls.Certificates(settings, wanted.host) if secure else None
        self._sock = bind(wanted)
        self._wanted = wanted

    def listener(self, app: ASGIApp, context: Context) -> Listener:
        """For `app`, which is guarded. Not started."""
        settings, certificates = self._settings, self.certificates
        if certificates is not None:
            certificates.alpn(ALPN)
        names = certificates.names if certificates is not None else ()
        hosts = Hosts.of(self._wanted.host, settings.domain, settings.public_url, names)
        shared = Shared(self._bounds)
        shared.serve(Edge(app, context, hosts, self._proxies, self._bounds, shared.bodies))
        made = Listener(
            self._sock, shared, None if certificates is None else certificates.context, self._proxies
        )
        scheme = "https" if certificates else "http"
        context.listening = (scheme, made.address.host, made.address.port)
        context.engine.metrics.gauges.append(made.gauges)
        return made

    def close(self) -> None:
        self._sock.close()
