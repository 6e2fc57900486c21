"""What goes wrong in a background thread and is survived: weather, and what nobody thought of."""

from __future__ import annotations

import logging

from kvtier.backends.object.stores.errors import EndlessListing, StoreError


class BackgroundErrors:
    """Says of each kind of error that is none of a store's once, with its trace; and that there is
    more in a store than can be listed."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[type[Exception]] = set()
        self.unsolved = False
        """Whether it has not gone well since."""

    def survived(self, error: Exception) -> None:
        """The thread goes on, and will try again."""
        self.unsolved = True
        endless = isinstance(error, EndlessListing)
        if (isinstance(error, StoreError) and not endless) or type(error) in self._said:
            self._log.debug("object tier: %s", error)
            return
        self._said.add(type(error))
        if endless:
            self._log.warning("the object store is not listed to its end: %s", error)
            return
        self._log.error("object tier: what it does in the background failed", exc_info=error)

    def over(self) -> None:
        """It has tried again, and all went well."""
        self.unsolved = False
