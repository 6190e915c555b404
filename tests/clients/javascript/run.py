"""Run JavaScript clients against a router with scripted workers; needs Node 20, npm and a package registry.

    python tests/clients/javascript/run.py [--codex] [--compatibility-test FOLDER]

Runs the Vercel AI SDK; with ``--codex`` Codex CLI (half a gigabyte); and OpenAI's own compatibility test,
where the folder ``compatibility-test`` of openai/gpt-oss is given. Scripted workers play the model,
so only the service is on trial.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import structlog

HERE = Path(__file__).parent
TSX = "tsx@4.20.3"
CODEX = "@openai/codex@0.171.0"
CODEX_CONFIG = """\
model = "{model}"
model_provider = "antiphon"
[model_providers.antiphon]
name = "Antiphon"
base_url = "{url}"
wire_api = "responses"
"""
NPM_INSTALL = ("npm", "install", "--silent", "--no-audit", "--no-fund")


def load_clients() -> ModuleType:
    """The router of the Python client tests."""
    spec = importlib.util.spec_from_file_location("clients", HERE.parent / "conftest.py")
    if spec is None or spec.loader is None:
        raise ImportError("conftest.py of the client tests is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ai_sdk(clients: ModuleType, folder: Path) -> int:
    """Copy the program, install what it needs, and run it."""
    for name in ("package.json", "ai_sdk.mjs"):
        shutil.copy(HERE / name, folder)
    subprocess.run(NPM_INSTALL, cwd=folder, check=True)
    router = clients.RunningRouter()
    try:
        environment = {**os.environ, "BASE_URL": router.url, "MODEL": clients.MODEL}
        return subprocess.run(["node", "ai_sdk.mjs"], cwd=folder, env=environment, check=False).returncode
    finally:
        router.stop()


def run_codex(clients: ModuleType, folder: Path) -> int:
    """Let Codex CLI write a file by its own tool and tell of it; 1 unless it did."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    subprocess.run([*NPM_INSTALL, CODEX], cwd=folder, check=True)

    def answer(prompt: str) -> str:
        if "functions.exec_command to=assistant" in prompt:
            return "<|channel|>final<|message|>The note is written.<|return|>"
        arguments = json.dumps({"cmd": "printf sung > note.txt"})
        return (
            "<|channel|>analysis<|message|>I write it.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.exec_command <|constrain|>json<|message|>{arguments}<|call|>"
        )

    router = clients.RunningRouter(answer, max_context_tokens=131_072)
    try:
        (home / "config.toml").write_text(CODEX_CONFIG.format(model=clients.MODEL, url=router.url))
        command = [str(folder / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check"]
        command += ["--sandbox", "danger-full-access", "Write a note."]
        result = subprocess.run(
            command,
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        router.stop()
    note = work / "note.txt"
    good = "The note is written." in result.stdout and note.is_file() and note.read_text() == "sung"
    sys.stdout.write(f"codex exec: {'passed' if good else result.stderr}\n")
    return int(not good)


def answers_of_cases(path: Path) -> dict[str, str]:
    """What a model should write to the input of every case."""
    answers = {}
    for line in path.read_text().splitlines():
        case = json.loads(line)
        answers[case["input"]] = (
            f"<|channel|>analysis<|message|>I call {case['tool_name']}.<|end|><|start|>assistant<|channel|>"
            f"commentary to=functions.{case['tool_name']} <|constrain|>json<|message|>"
            f"{case['expected_arguments']}<|call|>"
        )
    return answers


def run_compatibility_test(clients: ModuleType, source: Path, folder: Path) -> int:
    """Point the test at a router that knows its cases, and run it; 1 unless every case passed."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    answers = answers_of_cases(folder / "cases.jsonl")

    def answer(prompt: str) -> str:
        last = prompt.removesuffix("<|start|>assistant").rsplit("<|start|>", 1)[-1]
        if last.startswith("user<|message|>"):
            return answers[last.removeprefix("user<|message|>").removesuffix("<|end|>")]
        return clients.ANSWER_AFTER_CALL

    router = clients.RunningRouter(answer)
    try:
        provider = {
            "apiBaseUrl": router.url,
            "apiKey": "none",
            "apiType": ["responses", "chat"],
            "modelName": clients.MODEL,
        }
        text = f"export const PROVIDERS = {json.dumps({'antiphon': provider})};\n"
        (folder / "providers.ts").write_text(text)
        subprocess.run([*NPM_INSTALL, TSX], cwd=folder, check=True)
        command = ["npx", "tsx", "index.ts", "--provider", "antiphon"]
        subprocess.run(command, cwd=folder, check=True)
    finally:
        router.stop()
    (rollout,) = folder.glob("rollout_antiphon_*.jsonl")
    results = [json.loads(line) for line in rollout.read_text().splitlines()]
    passed = sum(bool(result["success"]) for result in results)
    sys.stdout.write(f"compatibility test: {passed} of {len(results)} passed\n")
    return int(passed < len(results) or passed < 2 * len(answers))


def main() -> int:
    """The number of suites that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compatibility-test", type=Path)
    parser.add_argument("--codex", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    clients = load_clients()
    with tempfile.TemporaryDirectory() as scratch:
        failed = int(run_ai_sdk(clients, Path(scratch)) != 0)
    if options.codex:
        with tempfile.TemporaryDirectory() as scratch:
            failed += run_codex(clients, Path(scratch))
    if options.compatibility_test is not None:
        with tempfile.TemporaryDirectory() as scratch:
            failed += run_compatibility_test(clients, options.compatibility_test, Path(scratch))
    return failed


if __name__ == "__main__":
    sys.exit(main())
