"""The date in prompts, from the deployment file to the system message."""

from __future__ import annotations

import datetime

import pytest
import yaml

from antiphon.configs.front_end import RouterConfig
from antiphon.configs.schema import DeploymentConfig
from antiphon.router.conversation import ChatMessage, Conversation, MessageRole
from antiphon.router.harmony.formatter import HarmonyFormatter

HI = Conversation(messages=(ChatMessage(MessageRole.USER, "hi"),))


def prompt_of(config: RouterConfig) -> str:
    formatter = HarmonyFormatter.configured(config)
    return formatter.vocabulary.decode(formatter.render(HI).token_ids)


def test_a_configured_date_reaches_the_system_message() -> None:
    tree = yaml.safe_load("model: {path: tiny}\nrouter: {current_date: 2025-06-28}\n")
    config = DeploymentConfig.model_validate(tree)
    # Actors get their configuration as JSON.
    config = DeploymentConfig.model_validate_json(config.model_dump_json())
    assert "\nCurrent date: 2025-06-28\n" in prompt_of(config.router)


def test_without_one_it_is_today() -> None:
    before = datetime.datetime.now(datetime.UTC).date()
    prompt = prompt_of(RouterConfig())
    after = datetime.datetime.now(datetime.UTC).date()
    assert any(f"\nCurrent date: {day.isoformat()}\n" in prompt for day in (before, after))


def test_no_date_is_an_error() -> None:
    with pytest.raises(ValueError, match="current_date"):
        RouterConfig.model_validate({"current_date": "soon"})
