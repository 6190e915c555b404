"""The pages that a browser sees: the playground at ``/`` and the API's reference at ``/docs``.

They are static files of the package, served from memory. They load nothing from anywhere else.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI, Request, Response

FOLDER = Path(__file__).parent / "playground"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_NAMED = {"/": "playground.html", "/docs": "reference.html"}
_FILES = {
    **_NAMED,
    **{f"/playground/{file.name}": file.name for file in FOLDER.iterdir() if file.suffix in (".css", ".js")},
}
PAGE_PATHS = frozenset(_FILES)
"""Every path that is served here."""

_HEADERS = {
    # Asked for again every time, answered with 304 while nothing changed: a new version is seen at once.
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def add_pages(app: FastAPI) -> None:
    """Serve the pages; they are no part of the API's document."""
    for path, name in _FILES.items():
        _add_file(app, path, FOLDER / name)


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    body = file.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag, "content-type": _MEDIA_TYPES[file.suffix]}

    @app.get(path, include_in_schema=False)
    async def page(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)
