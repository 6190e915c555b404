"""Run by `helm test`: the API is alive and ready, and answers a chat request. Only the standard library."""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 60


def main() -> int:
    """Check the service at the URL given as the only argument; 0 when all is well."""
    base = sys.argv[1]
    # The certificate is for the name that clients use, not for the Service's.
    context = ssl._create_unverified_context() if base.startswith("https") else None
    lines = os.environ.get("ANTIPHON_API_KEYS", "").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {keys[0]}"} if keys else {})

    def call(path: str, body: object = None) -> dict[str, object]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            found: dict[str, object] = json.loads(answer.read() or b"{}")
            return found

    for path in ("/health", "/ready"):
        call(path)
        sys.stdout.write(f"{path}: ok\n")
    message = {"role": "user", "content": "Hello!"}
    models = call("/v1/models")["data"]
    if not isinstance(models, list):
        raise TypeError(f"/v1/models: {models}")
    answer = call("/v1/chat/completions", {"model": models[0]["id"], "messages": [message], "max_tokens": 8})
    sys.stdout.write(f"/v1/chat/completions: {json.dumps(answer['usage'])}\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.url}: {error.code} {error.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{sys.argv[1:]}: {error}")
