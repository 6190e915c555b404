"""Training and held-out examples: disjoint, right by their own judge, rendered as openai-harmony renders."""

from __future__ import annotations

import dataclasses
from random import Random

import openai_harmony as oh
import pytest

from antiphon.demo import harmony
from antiphon.demo.dataset import IGNORED, held_out_examples, make_shard, shard_stream
from antiphon.demo.dialogue import (
    AssistantTurn,
    Effort,
    Example,
    Split,
    ToolTurn,
    Turn,
    UserTurn,
    split_of,
)
from antiphon.demo.evaluate import judge
from antiphon.demo.mixture import SKILLS, make_example
from antiphon.demo.questions import Question, prompt_parts, question_of
from antiphon.demo.skills.functions import ACTION_VERBS, NOUNS, QUERY_VERBS, function_name
from antiphon.demo.vocabulary import FULL_VOCABULARY, load_vocabulary

pytestmark = pytest.mark.usefixtures("harmony_vocabulary")


def examples(split: Split, count: int, skill: str | None = None) -> list[Example]:
    words = load_vocabulary().words
    return [make_example(Random(f"test {split} {skill} {i}"), split, words, skill) for i in range(count)]


@pytest.mark.parametrize("skill", SKILLS)
def test_splits_share_no_phrasing_operand_or_name(skill: str) -> None:
    train = {key for example in examples(Split.TRAIN, 1500, skill) for key in example.keys}
    held_out = {key for example in examples(Split.HELD_OUT, 400, skill) for key in example.keys}
    assert train
    assert held_out
    assert not train & held_out


def test_held_out_functions_are_named_with_words_no_trained_function_has() -> None:
    def names(split: Split) -> set[str]:
        return {e.keys[0] for e in examples(split, 800, "tools_unseen") if e.keys[0].startswith("function ")}

    train, held_out = names(Split.TRAIN), names(Split.HELD_OUT)
    assert len(held_out) > 200
    assert not train & held_out


def test_a_name_of_two_nouns_belongs_to_one_split() -> None:
    words = load_vocabulary().words
    both = sorted({*QUERY_VERBS, *ACTION_VERBS} & {*NOUNS})
    assert {"order", "post"} <= {*both}
    split = {noun: split_of(f"function {noun}") for noun in both}
    names: dict[Split, set[str]] = {each: set() for each in Split}
    for verb in both:
        for noun in both:
            for seed in range(60):
                names[split[noun]].add(function_name(Random(seed), verb, noun, words))
    assert all(names.values())
    assert not names[Split.TRAIN] & names[Split.HELD_OUT]


@pytest.mark.parametrize("skill", SKILLS)
@pytest.mark.parametrize("split", Split)
def test_every_reply_satisfies_its_own_judge(skill: str, split: Split) -> None:
    for example in examples(split, 60, skill):
        rendered = harmony.render(example)
        verdict = judge(question_of(example), rendered.token_ids[rendered.prompt_tokens :])
        assert verdict.well_formed
        assert verdict.right, (example.turns[-1], example.reply, example.expect)
        assert verdict.reply == example.reply


def library_messages(turns: tuple[Turn, ...]) -> list[oh.Message]:
    """The turns as the library's own messages; thoughts before the last final answer are dropped."""
    finals = [i for i, turn in enumerate(turns) if isinstance(turn, AssistantTurn) and turn.final is not None]
    messages = []
    for index, turn in enumerate(turns):
        if isinstance(turn, UserTurn):
            messages.append(oh.Message.from_role_and_content(oh.Role.USER, turn.text))
        elif isinstance(turn, ToolTurn):
            author = oh.Author.new(oh.Role.TOOL, f"functions.{turn.name}")
            message = oh.Message.from_author_and_content(author, turn.text)
            messages.append(message.with_recipient("assistant").with_channel("commentary"))
        else:
            messages += assistant_messages(turn, keep_analysis=not finals or index > finals[-1])
    return messages


def assistant_messages(turn: AssistantTurn, keep_analysis: bool) -> list[oh.Message]:
    def message(text: str, channel: str) -> oh.Message:
        return oh.Message.from_role_and_content(oh.Role.ASSISTANT, text).with_channel(channel)

    messages = [message(turn.analysis, "analysis")] if keep_analysis and turn.analysis else []
    if turn.call is not None:
        called = message(turn.call.arguments, "commentary").with_recipient(f"functions.{turn.call.name}")
        messages.append(called.with_content_type("json"))
    if turn.final is not None:
        messages.append(message(turn.final, "final"))
    return messages


@pytest.mark.parametrize("skill", SKILLS)
def test_rendering_is_that_of_the_library_for_the_whole_conversation(skill: str) -> None:
    config = oh.RenderConversationConfig(auto_drop_analysis=False)
    for example in examples(Split.TRAIN, 60, skill):
        messages = [harmony._system(example.effort, example.date)]
        if example.instructions is not None or example.tools:
            messages.append(harmony._developer(example.instructions, example.tools))
        messages += library_messages(example.turns)
        conversation = oh.Conversation.from_messages(messages)
        whole = harmony.encoding().render_conversation_for_completion(conversation, oh.Role.ASSISTANT, config)
        rendered = harmony.render(example)
        assert rendered.token_ids[: rendered.prompt_tokens] == whole
        reply = [t for m in assistant_messages(example.reply, True) for t in harmony.encoding().render(m)]
        stop = harmony.CALL if example.reply.call else harmony.RETURN
        assert [*whole, *reply[2:-1], stop] == rendered.token_ids


def test_a_question_survives_its_json_form_and_gives_the_same_prompt() -> None:
    for example in examples(Split.HELD_OUT, 150):
        question = Question.from_json(question_of(example).to_json())
        assert question == question_of(example)
        turns, tools, instructions = prompt_parts(question)
        prompt = harmony.render_prompt(turns, tools, question.effort, instructions, question.date)
        rendered = harmony.render(example)
        assert prompt == rendered.token_ids[: rendered.prompt_tokens]


def test_more_effort_means_a_longer_thought() -> None:
    words = load_vocabulary().words
    for skill in ("facts", "arithmetic", "copying", "refusal"):
        for i in range(30):
            low, medium, high = (
                len(SKILLS[skill][0](Random(f"{skill} {i}"), Split.TRAIN, effort, words).reply.analysis)
                for effort in Effort
            )
            assert low < medium < high


def test_offered_functions_include_the_one_to_call_and_names_are_unique() -> None:
    for example in examples(Split.TRAIN, 300, "tools_unseen"):
        names = [tool.name for tool in example.tools]
        assert len(names) == len(set(names))
        if example.expect.call is not None:
            assert example.expect.call.name in names
        else:
            assert isinstance(example.turns[-1], ToolTurn)


def test_no_offered_function_shares_a_word_with_a_question_that_needs_none() -> None:
    for example in examples(Split.TRAIN, 200, "no_call"):
        assert example.reply.call is None
        assert isinstance(example.turns[-1], UserTurn)


def test_shards_depend_on_seed_and_index_alone() -> None:
    first, again, other = (make_shard(seed, 3, 2, 640) for seed in (7, 7, 8))
    assert (first.inputs == again.inputs).all()
    assert (first.targets == again.targets).all()
    assert not (first.inputs == other.inputs).all()
    streamed = list(shard_stream(7, 2, 640, workers=0, count=4))[3]
    assert (streamed.inputs == first.inputs).all()


def test_a_shard_trains_replies_only_and_their_tokens_are_kept() -> None:
    vocabulary = load_vocabulary()
    row_of = {token: row for row, token in enumerate(vocabulary.token_ids)}
    shard = make_shard(0, 0, 4, 1024)
    assert (shard.targets < vocabulary.unseen).all()
    for row in range(4):
        for document in range(1, int(shard.documents[row].max())):
            (where,) = (shard.documents[row] == document).nonzero()
            trained = shard.targets[row, where] != IGNORED
            first = int(trained.argmax())
            assert trained[first:].all()
            assert shard.inputs[row, where[first]] == row_of[173_781]  # "assistant", after <|start|>
            assert shard.targets[row, where[-1]] in (row_of[harmony.RETURN], row_of[harmony.CALL])


def test_a_row_is_one_system_message_and_conversations_that_continue_it() -> None:
    shard = make_shard(3, 1, 6, 1024)
    vocabulary = load_vocabulary()
    for inputs, documents, positions in zip(shard.inputs, shard.documents, shard.positions, strict=True):
        opening = int((documents == 0).sum())
        text = harmony.encoding().decode([vocabulary.token_ids[row] for row in inputs[:opening]])
        assert text.startswith("<|start|>system<|message|>You are ChatGPT")
        assert text.endswith("<|end|>")
        assert documents.max() > 2
        for document in range(1, int(documents.max())):
            (where,) = (documents == document).nonzero()
            assert inputs[where[0]] == inputs[0]  # <|start|>
            assert positions[where].tolist() == list(range(opening, opening + len(where)))


def test_vocabulary_rows_are_sorted_unique_and_cover_harmony() -> None:
    vocabulary = load_vocabulary()
    assert list(vocabulary.token_ids) == sorted(set(vocabulary.token_ids))
    assert {harmony.RETURN, harmony.CALL, harmony.START, harmony.END} <= set(vocabulary.token_ids)
    table = vocabulary.row_table()
    assert len(table) == FULL_VOCABULARY
    assert table.count(vocabulary.unseen) == vocabulary.unseen_tokens


def test_held_out_examples_are_the_same_every_time() -> None:
    assert held_out_examples(1, 3) == held_out_examples(1, 3)
    efforts = {dataclasses.replace(e).effort for e in held_out_examples(1, 20, ("facts",))}
    assert efforts == set(Effort)


def test_held_out_answers_can_be_spelt_with_the_rows_that_the_model_keeps() -> None:
    kept = set(load_vocabulary().token_ids)
    for example in held_out_examples(2, 30, ("copying", "spelling", "tools", "multi_turn")):
        rendered = harmony.render(example)
        assert kept.issuperset(rendered.token_ids[rendered.prompt_tokens :])
