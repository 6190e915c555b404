"""HTTPS, and which web pages may call the API."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import httpx
import pydantic
import pytest

from antiphon.configs.front_end import RouterConfig
from antiphon.protocol.errors import ConfigError


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1 and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with the openssl command, which is not installed")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


async def test_https(deploy, certificate):
    deployment = await deploy(tls_certificate_file=certificate[0], tls_key_file=certificate[1])
    assert deployment.server.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=certificate[0])
    async with httpx.AsyncClient(verify=context) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        response = await client.post(f"{deployment.server.url}/v1/chat/completions", json=body)
    assert response.text.endswith("data: [DONE]\n\n")


async def test_unusable_certificate_is_one_clear_error(deploy, tmp_path, certificate):
    with pytest.raises(ConfigError, match=r"router\.tls_certificate_file .*missing\.pem"):
        await deploy(tls_certificate_file=str(tmp_path / "missing.pem"), tls_key_file=certificate[1])
    (tmp_path / "broken.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"router\.tls_certificate_file .*broken\.pem"):
        await deploy(tls_certificate_file=str(tmp_path / "broken.pem"), tls_key_file=certificate[1])


def test_a_certificate_needs_its_key():
    with pytest.raises(pydantic.ValidationError, match="go together"):
        RouterConfig(tls_certificate_file="certificate.pem")


PREFLIGHT = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


async def test_no_page_may_call_unless_named(deploy):
    deployment = await deploy()
    response = await deployment.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


async def test_named_pages_may_call(deploy, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    deployment = await deploy(cors_origins=["https://page.example"], api_key_file=str(keys))
    allowed = await deployment.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    other = await deployment.http.options(
        "/v1/chat/completions", headers={**PREFLIGHT, "Origin": "https://other.example"}
    )
    assert "access-control-allow-origin" not in other.headers
    refused = await deployment.http.get("/v1/models", headers={"Origin": "https://page.example"})
    # The page must be able to read why.
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
