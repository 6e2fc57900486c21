"""Errors in a background thread, which goes on: expected ones of the store, and all others."""

from __future__ import annotations

import logging

from kvtier.backends.object.stores.errors import EndlessListing, StoreError


class BackgroundErrors:
    """Logs every kind of unexpected error once, with its trace, and once that a listing has no end.
    Other errors of a store are for its circuit breaker to log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[type[Exception]] = set()
        self.unresolved = False
        """Whether nothing has succeeded since the last error."""

    def record(self, error: Exception) -> None:
        """The thread goes on, and will try again."""
        self.unresolved = True
        endless = isinstance(error, EndlessListing)
        if (isinstance(error, StoreError) and not endless) or type(error) in self._logged:
            self._log.debug("object tier: %s", error)
            return
        self._logged.add(type(error))
        if endless:
            self._log.warning("the object store is not listed to its end: %s", error)
            return
        self._log.error("object tier: what it does in the background failed", exc_info=error)

    def clear(self) -> None:
        """The thread has tried again, and all went well."""
        self.unresolved = False
