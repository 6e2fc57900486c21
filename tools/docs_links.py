"""A hook of mkdocs: links to files beside docs/ lead to the repository, or become plain paths where
the site does not know its address."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with each page before it is rendered."""
    return with_links(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"), config["repo_url"])


def with_links(markdown: str, folder: str, repository: str | None) -> str:
    """The page, which stands in `folder`; `repository` is an address, if there is one."""

    def shown(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        if repository:
            return f"[{link[1]}]({repository}/blob/HEAD/{path}{link[3] or ''})"
        return f"{link[1]} (`{path}`)"

    return _LINK.sub(shown, markdown)
