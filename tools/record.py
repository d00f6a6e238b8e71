"""Puts what a tool has measured into its place on a page: between two comments with its name."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path


def put(page: Path, name: str, text: str, how: str = "") -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end of name -->`; `how` it was made."""
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    old = page.read_text("utf-8")
    if len(place.findall(old)) != 1:
        raise SystemExit(f"{page} has no place for {name}.")
    made = f" by {how}" if how else ""
    body = f"Written by the tool on {date.today()}{made}.\n\n{text}\n\n"
    page.write_text(place.sub(lambda match: match[1] + "\n" + body + match[2], old), "utf-8")
