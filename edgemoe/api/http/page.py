"""Serves the page at / and its files, under a strict policy."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FILES = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = {
    "/": "index.html",
    **{f"/page/{file.name}": file.name for file in FILES.iterdir() if file.suffix in TYPES and file.suffix != ".html"},
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Answers with the page, or a file of it."""
    file = FILES / PAGE[request.url.path]
    return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=HEADERS)
