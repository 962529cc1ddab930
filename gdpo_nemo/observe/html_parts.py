"""Parts of pages that need nothing else: no script, no network, everything escaped."""

from __future__ import annotations

import base64
import html
from typing import Iterable, Sequence

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.2rem; border-bottom: 1px solid #e6e9ed } img { max-width: 100% }
table { border-collapse: collapse }
td, th { padding: .25rem .9rem; text-align: right; border-bottom: 1px solid #eef0f3 }
td:first-child, th:first-child { text-align: left; padding-left: 0 } .alert { color: #a8231c }
pre { background: #f6f7f9; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 }
dt { float: left; clear: left; min-width: 13rem } dd { margin-left: 13.5rem }
summary { cursor: pointer } .dim { color: #6b7480 } details { margin: .6rem 0 }
"""


def document(title: str, body: Iterable[str]) -> str:
    """A whole page; the title is escaped, the body is HTML."""
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"


def section(title: str, parts: Sequence[str]) -> list[str]:
    """A heading and what follows; nothing where nothing does."""
    return [f"<h2>{title}</h2>", *parts] if parts else []


def image(png: bytes, what: str) -> str:
    """The picture itself, in the page."""
    return f'<img alt="{what}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of text."""
    return f"<table>{_row('th', heads)}{''.join(_row('td', row) for row in rows)}</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
