"""Who may enter."""

from __future__ import annotations

import httpx
import openai
import pytest

from antiphon.protocol.errors import ConfigError
from antiphon.router import api_keys
from antiphon.router.api_keys import ApiKeys

FIRST, SECOND, THIRD = "first-key-0123456789", "second-key-0123456789", "third-key-0123456789"


@pytest.fixture(autouse=True)
def _reload_at_once(monkeypatch):
    monkeypatch.setattr(api_keys, "RELOAD_CHECK_S", 0.0)
    monkeypatch.delenv(api_keys.ENVIRONMENT, raising=False)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# who: team a\n{FIRST}\n\n  {SECOND}  \n")
    return path


def test_everyone_enters_where_no_key_is_configured():
    assert ApiKeys(None).identify(None) == api_keys.ANYONE


def test_keys_of_a_file(key_file):
    keys = ApiKeys(str(key_file))
    assert keys.identify(f"Bearer {FIRST}")
    assert keys.identify(f"bearer  {SECOND}")
    refused = (
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {FIRST}",
        FIRST,
        f"Bearer {FIRST}x",
        "Bearer # who: team a",
    )
    for authorization in refused:
        assert keys.identify(authorization) is None, authorization


def test_a_key_is_revoked_by_reload(key_file):
    keys = ApiKeys(str(key_file))
    key_file.write_text(f"{THIRD}\n")
    assert keys.identify(f"Bearer {FIRST}") is None
    assert keys.identify(f"Bearer {THIRD}")
    key_file.write_text("")
    assert keys.identify(f"Bearer {THIRD}") is None, "an empty file lets nobody in"
    assert keys.required


def test_a_file_that_goes_missing_keeps_its_keys(key_file):
    keys = ApiKeys(str(key_file))
    key_file.unlink()
    assert keys.identify(f"Bearer {FIRST}")
    assert keys.identify(None) is None


def test_keys_of_the_environment(monkeypatch, key_file):
    monkeypatch.setenv(api_keys.ENVIRONMENT, f"{SECOND},{THIRD}")
    keys = ApiKeys(None)
    assert keys.identify(f"Bearer {THIRD}")
    assert keys.identify(f"Bearer {FIRST}") is None
    assert ApiKeys(str(key_file)).identify(f"Bearer {THIRD}")


def test_unusable_keys_are_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"router\.api_key_file .*missing"):
        ApiKeys(str(tmp_path / "missing"))
    short = tmp_path / "short"
    short.write_text("abc\n")
    with pytest.raises(ConfigError, match="fewer than 16 characters"):
        ApiKeys(str(short))


async def test_keys_over_http(deploy, key_file):
    deployment = await deploy(api_key_file=str(key_file))
    for path in ("/health", "/ready", "/metrics"):
        assert (await deployment.http.get(path)).status_code == 200
    for response in (await deployment.chat(), await deployment.http.get("/v1/models")):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert not deployment.workers.workers["d0"].sent
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {FIRST}"}) as client:
        assert (await client.get(f"{deployment.server.url}/v1/models")).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        await deployment.openai.models.list()
    assert await deployment.metric("request_errors_total", error_type="invalid_api_key") == 3
