"""The optional dependency: modules of botocore, imported when they are needed and not before."""

from __future__ import annotations

import importlib
from typing import Any

from kvtier.errors import ExtraMissing


def optional_module(module: str) -> Any:
    """A module of the `s3` extra; raises ExtraMissing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ExtraMissing("an s3:// store", "s3") from error
