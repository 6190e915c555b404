"""The ways in which an answer may leave the format, each understood in one way and counted by kind."""

from __future__ import annotations

from enum import StrEnum


class Repair(StrEnum):
    """Labels of the metric of repaired answers; what each means to the reader is in docs/harmony.md."""

    START_MISSING = "start_missing"
    START_REPEATED = "start_repeated"
    END_MISSING = "end_missing"
    MESSAGE_MISSING = "message_missing"
    HEADER_MISSING = "header_missing"
    HEADER_CUT = "header_cut"
    HEADER_DROPPED = "header_dropped"
    HEADER_JUNK = "header_junk"
    HEADER_AUTHOR = "header_author"
    HEADER_TEXT = "header_text"
    FOREIGN_AUTHOR = "foreign_author"
    CHANNEL_MISSING = "channel_missing"
    CHANNEL_UNKNOWN = "channel_unknown"
    CHANNEL_CASE = "channel_case"
    CHANNEL_GLUED = "channel_glued"
    CHANNEL_REPEATED = "channel_repeated"
    CHANNEL_UNMARKED = "channel_unmarked"
    RECIPIENT_REPEATED = "recipient_repeated"
    RECIPIENT_UNMARKED = "recipient_unmarked"
    RECIPIENT_SPELLING = "recipient_spelling"
    RECIPIENT_BARE = "recipient_without_namespace"
    RECIPIENT_GLUED = "recipient_with_glued_suffix"
    RECIPIENT_UNDECLARED = "recipient_undeclared"
    RECIPIENT_UNKNOWN = "recipient_unknown"
    CALL_CHANNEL = "call_channel"
    CALL_WITHOUT_ARGUMENTS = "call_without_arguments"
    CALL_WITHOUT_RECIPIENT = "call_without_recipient"
    CALL_NOT_ALLOWED = "call_not_allowed"
    CALL_BEYOND_LIMIT = "call_beyond_limit"
    STRAY_MARKER = "stray_marker"
    STRAY_TERMINATOR = "stray_terminator"
    RESERVED_TOKEN = "reserved_token"
    UNKNOWN_TOKEN = "unknown_token"
    CODE_POINT_CUT = "code_point_cut"
